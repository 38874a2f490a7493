"""The laws of acceptance: which graphs carry each of them, and their calls on a round's tensors.

The formulas live in the graphs (export side, `forerun_export.sampling`) and, in plain Python, in `forerun.oracle`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forerun.engine import Call, Engine, Tensor
from forerun.errors import EngineError
from forerun.workspace import RoundTensors


@dataclass(frozen=True)
class Law:
    """A rule of acceptance, as the names of the graphs that carry it out.

    `draw` samples a token from logits, `propose` does so and keeps q for the test, `verify` accepts and corrects.
    """

    name: str
    draw: str
    propose: str
    verify: str
    samples: bool  # whether it uses temperatures and uniforms


LAWS: Mapping[str, Law] = {
    law.name: law
    for law in (
        Law("residual", draw="draw", propose="propose", verify="verify-residual", samples=True),
        Law("greedy", draw="draw-greedy", propose="propose-greedy", verify="verify-greedy", samples=False),
    )
}


def common_law(names: Iterable[str]) -> Law:
    """The law that carries out those of all rows in one call.

    At temperature 0 `residual` works with one-hot p and q and so *is* `greedy`: mixed rows run under it.
    """
    return LAWS["greedy"] if set(names) == {"greedy"} else LAWS["residual"]


class SamplingGraphs:
    """The sampling engines of an engine directory, bound to a round's tensors on first use.

    Raises EngineError where a law's graph is missing: rows of any law may meet in one batch.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        names = [name for law in LAWS.values() for name in (law.draw, law.propose, law.verify)]
        if missing := [name for name in names if name not in engines]:
            raise EngineError(f"sampling graphs are missing: {', '.join(missing)}; export the pair again")
        self._engines = engines
        self._bound: dict[tuple[str, RoundTensors], Call] = {}

    def draw(self, law: Law, tensors: RoundTensors) -> Call:
        """Sample `next_token` from `logits`, which hold one row for each row of the batch."""
        return self._call(law.draw, tensors, tensors.for_draw)

    def propose(self, law: Law, tensors: RoundTensors) -> Call:
        """Sample proposal number `step` from `draft_logits`: into `draft_token`, `tokens` and `q`."""
        return self._call(law.propose, tensors, tensors.for_propose)

    def verify(self, law: Law, tensors: RoundTensors) -> Call:
        """Accept a prefix of the proposals: into `accepted` and `next_token`."""
        return self._call(law.verify, tensors, tensors.for_verify)

    def _call(self, graph: str, tensors: RoundTensors, names: Mapping[str, Tensor]) -> Call:
        key = (graph, tensors)
        if (call := self._bound.get(key)) is None:
            engine = self._engines[graph]
            call = self._bound[key] = engine.bind(
                {spec.name: names[spec.name] for spec in engine.inputs},
                {spec.name: names[spec.name] for spec in engine.outputs},
            )
        return call

    def forget(self) -> None:
        """Drop every binding, because the tensors have moved."""
        self._bound.clear()
