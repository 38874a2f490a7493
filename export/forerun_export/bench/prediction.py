"""Leviathan's speed-up from measured costs, beside the one that was observed, and where the rest of the time went.

Leviathan et al. 2211.17192 (theorem 3.8 with measured costs): a round of K proposals, each kept with probability a,
emits (1 - a^(K+1)) / (1 - a) tokens on average and takes K T_draft + T_target(K + 1), where plain decoding takes
T_target(1) a token. Where K changes from round to round, tokens and seconds are summed over the rounds as they were.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun_export.bench.engines import PLAIN, Engine
from forerun_export.bench.measuring import Measured
from forerun_export.bench.runs import TimedRound, median_runs
from forerun_export.bench.statistics import Estimate
from forerun_export.bench.summaries import against
from forerun_export.bench.time_split import mean_seconds, phase_seconds, timed_rounds


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Speed-ups over plain decoding, and what they are made of. Times are seconds, of a round where not said else.

    acceptance: a, the maximum likelihood of a constant one: accepted over accepted and corrected.
    target_s: of one call of the target, by its tokens M. draft_s: of one proposal; None where no model drafted.
    expected_tokens, tokens: a round, by the formula and as observed.
    predicted: the formula. with_observed_tokens: the same with the observed tokens in place of the formula's.
    draft, verify, sampling, host: what a round took; plain_*: what a token took in plain decoding.
    """

    engine: str
    rounds: int
    acceptance: float | None
    mean_draft_length: float
    target_s: Mapping[int, float]
    draft_s: float | None
    expected_tokens: float
    tokens: float
    predicted: float
    with_observed_tokens: float
    observed: Estimate | None
    draft: float
    verify: float
    sampling: float
    host: float
    plain_target: float
    plain_sampling: float
    plain_host: float

    def to_json(self) -> dict[str, Any]:
        """As an object of the report's JSON."""
        return {**asdict(self), "target_s": {str(m): seconds for m, seconds in self.target_s.items()}}


def prediction(engine: Engine, measured: Measured, category: str | None = None) -> Prediction | None:
    """For an engine of forerun that drafts; None where it or plain decoding has no round to look at."""
    runs, plain_runs = (median_runs(measured.of(name, category)) for name in (engine.name, PLAIN))
    rounds, plain = timed_rounds(runs), timed_rounds(plain_runs)
    if not rounds or not plain or engine.is_plain or not engine.is_forerun:
        return None
    spent, spent_plain = mean_seconds(rounds), mean_seconds(plain)
    target_s = {**_target_seconds(rounds), 1: _target_seconds(plain)[1]}
    acceptance, draft_s = _acceptance(rounds), _draft_seconds(rounds)
    expected = sum(expected_tokens(acceptance or 0.0, _proposed(timed)) for timed in rounds)
    tokens = sum(timed.round.tokens for timed in rounds)
    seconds = sum(target_s[_proposed(timed) + 1] + _drafting(timed, draft_s) for timed in rounds)
    count = len(rounds)
    return Prediction(
        engine=engine.name,
        rounds=count,
        acceptance=acceptance,
        mean_draft_length=sum(_proposed(timed) for timed in rounds) / count,
        target_s=dict(sorted(target_s.items())),
        draft_s=draft_s,
        expected_tokens=expected / count,
        tokens=tokens / count,
        predicted=expected * target_s[1] / seconds,
        with_observed_tokens=tokens * target_s[1] / seconds,
        observed=against(runs, plain_runs),
        draft=spent["draft"],
        verify=spent["target"],
        sampling=spent["sampling"],
        host=spent["host"],
        plain_target=spent_plain["target"],
        plain_sampling=spent_plain["sampling"],
        plain_host=spent_plain["host"],
    )


def expected_tokens(acceptance: float, draft_length: int) -> float:
    """(1 - a^(K+1)) / (1 - a), which is K + 1 at a = 1."""
    return sum(acceptance**kept for kept in range(draft_length + 1))


def _proposed(timed: TimedRound) -> int:
    return timed.round.proposed or 0


def _target_seconds(rounds: Sequence[TimedRound]) -> dict[int, float]:
    """T_target(M): the median over the rounds with M tokens."""
    by_tokens: dict[int, list[float]] = {}
    for timed in rounds:
        by_tokens.setdefault(_proposed(timed) + 1, []).append(phase_seconds(timed, "target"))
    return {tokens: statistics.median(seconds) for tokens, seconds in by_tokens.items()}


def _draft_seconds(rounds: Sequence[TimedRound]) -> float | None:
    """T_draft: the median over rounds in which a model proposed, of a proposal's share."""
    shares = [phase_seconds(timed, "draft") / _proposed(timed) for timed in rounds if _drafting(timed, 1.0)]
    return statistics.median(shares) if shares else None


def _drafting(timed: TimedRound, draft_s: float | None) -> float:
    """Seconds that a round's proposals take by T_draft; an n-gram's come without an engine."""
    return _proposed(timed) * (draft_s or 0.0) if phase_seconds(timed, "draft") > 0 else 0.0


def _acceptance(rounds: Sequence[TimedRound]) -> float | None:
    accepted = sum(timed.round.accepted or 0 for timed in rounds)
    corrected = sum((timed.round.accepted or 0) < _proposed(timed) for timed in rounds)
    return accepted / (accepted + corrected) if accepted + corrected else None
