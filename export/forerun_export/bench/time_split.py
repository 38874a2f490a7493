"""Where the time of a round goes, and what speed-up there would be if a part of it cost nothing more."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun_export.bench.engines import PLAIN, Engine
from forerun_export.bench.measuring import Measured
from forerun_export.bench.runs import PHASES, Run, TimedRound, median_runs

PARTS = ("draft", "target", "sampling", "host")


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """An engine's rounds behind the first ones: how many, the tokens that one emits, its seconds by PARTS.

    A plain round emits one token. Speed-ups over plain decoding, each of tokens a round times a plain round's seconds
    over a round's: `speed_up` as it was, `draft_free` if proposals cost nothing, `verification_free` if the target
    took no longer for all tokens of a round than for one. What holds a speed-up back is what lifts it most.
    """

    engine: str
    rounds: int
    tokens: float
    seconds: Mapping[str, float]
    speed_up: float
    draft_free: float
    verification_free: float

    @property
    def round_s(self) -> float:
        """Seconds of a round."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """As an object of the report's JSON."""
        return asdict(self)


def time_split(engine: Engine, measured: Measured, category: str | None = None) -> TimeSplit | None:
    """For an engine of forerun; None where it or plain decoding has no round to look at."""
    if not engine.is_forerun:
        return None
    rounds, plain = (timed_rounds(median_runs(measured.of(name, category))) for name in (engine.name, PLAIN))
    if not rounds or not plain:
        return None
    spent, spent_plain = mean_seconds(rounds), mean_seconds(plain)
    tokens = statistics.fmean(timed.round.tokens for timed in rounds)
    worth = tokens * sum(spent_plain.values())  # seconds that plain decoding takes for the tokens of a round
    taken = sum(spent.values())
    return TimeSplit(
        engine=engine.name,
        rounds=len(rounds),
        tokens=tokens,
        seconds=spent,
        speed_up=worth / taken,
        draft_free=worth / (taken - spent["draft"]),
        verification_free=worth / (taken - spent["target"] + spent_plain["target"]),
    )


def timed_rounds(runs: Sequence[Run]) -> list[TimedRound]:
    """The rounds that tell what their engines took."""
    return [timed for run in runs for timed in run.timed_rounds() if timed.round.seconds is not None]


def phase_seconds(timed: TimedRound, phase: str) -> float:
    """Seconds of a round in the engines of one of PHASES."""
    return (timed.round.seconds or {}).get(phase, 0.0)


def mean_seconds(rounds: Sequence[TimedRound]) -> dict[str, float]:
    """Mean seconds of a round by PARTS: in the engines of each phase, and what is left, on the host."""
    spent = {phase: statistics.fmean(phase_seconds(timed, phase) for timed in rounds) for phase in PHASES}
    spent["host"] = statistics.fmean(timed.taken_s for timed in rounds) - sum(spent.values())
    return {part: spent[part] for part in PARTS}
