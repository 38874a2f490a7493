"""Whether speculation changed a token in the very runs that were timed, and how that was looked at."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from forerun_export.bench.engines import PLAIN, Engine
from forerun_export.bench.measuring import Measured, Settings
from forerun_export.bench.runs import Run

Status = Literal["plain", "equal", "differs", "not checkable", "no reference"]
CERTIFICATE = (
    "drawn tokens differ from plain decoding's by chance; that their law is the target's is what `forerun certify DIR` "
    "shows (enumeration, graphs, engines)"
)


@dataclass(frozen=True)
class Lossless:
    """`equal` of `texts` outputs are token for token those of plain decoding; None where that is not comparable.

    `as_forerun_plain`: for other libraries, how many outputs are those of forerun's plain decoding.
    """

    status: Status
    how: str
    equal: int | None = None
    texts: int | None = None
    as_forerun_plain: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As an object of the report's JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.equal is not None:
            return f"{self.equal} of {self.texts} equal"
        same = "" if self.as_forerun_plain is None else f", {self.as_forerun_plain} of {self.texts} as forerun"
        return f"{self.status}{same}"


def lossless(engine: Engine, measured: Measured, settings: Settings, category: str | None = None) -> Lossless:
    """Compare an engine's outputs with plain decoding's of the same run."""
    found = _outputs(measured.of(engine.name, category))
    ours = _same(found, _outputs(measured.of(PLAIN, category))) if settings.temperature == 0 else None
    as_forerun = None if engine.is_forerun or ours is None else ours[0]
    if engine.is_plain:
        how = "decodes without speculation: what its drafts are held to"
        return Lossless("plain", how, texts=len(found), as_forerun_plain=as_forerun)
    name = settings.law_name
    if not (name == "greedy" or (name == "coupled" and engine.is_forerun)):
        how = CERTIFICATE if engine.is_forerun else "drawn tokens differ from plain decoding's by chance"
        return Lossless("not checkable", how, texts=len(found))
    equal, texts = _same(found, _outputs(measured.of(engine.plain, category)))
    if not texts:
        return Lossless("no reference", f"{engine.plain} did not run", texts=len(found), as_forerun_plain=as_forerun)
    seeds = "" if name == "greedy" else " with the same seed"
    how = f"{name}: token for token against {engine.plain}{seeds}, in this run"
    return Lossless("equal" if equal == texts else "differs", how, equal, texts, as_forerun)


def _outputs(runs: Sequence[Run]) -> Mapping[int, set[tuple[int, ...]]]:
    """What was ever said to each prompt, by its number."""
    said: dict[int, set[tuple[int, ...]]] = {}
    for run in runs:
        said.setdefault(run.prompt, set()).add(run.output.tokens)
    return said


def _same(found: Mapping[int, set[tuple[int, ...]]], expected: Mapping[int, set[tuple[int, ...]]]) -> tuple[int, int]:
    """To how many prompts all repeats of both said one and the same, and how many prompts both have."""
    both = found.keys() & expected.keys()
    return sum(len(found[prompt] | expected[prompt]) == 1 for prompt in both), len(both)
