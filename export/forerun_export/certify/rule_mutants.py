"""Rules of acceptance that look right and are not, as rules that the enumeration can take.

Each keeps the shape of a round: how often n proposals are accepted, and the law of the token after them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.oracle import (
    Law,
    Outcome,
    Rule,
    Table,
    Tokens,
    argmax,
    draw_from_target_rule,
    one_hot,
    residual,
    residual_rule,
)
from forerun_export.certify.tables import MAKERS, make_pair

SMALL_Q = 0.25
FREQUENCY_PENALTY = 0.7


@dataclass(frozen=True)
class RuleMutant:
    """A wrong rule and the models that it is tried on."""

    name: str
    target: Table
    draft: Table
    rule: Rule


def rule_mutants(vocabulary: int = 3, seed: int = 0) -> list[RuleMutant]:
    """All of them on one random pair, with K of at least 2 in mind."""
    pair = make_pair("random", MAKERS["random"], vocabulary, seed)
    other = make_pair("random", MAKERS["random"], vocabulary, seed + 1_000)
    target, draft = pair.target, pair.draft
    top_two = _drawn(_keep_two, draft, draft)
    likeliest = _drawn(lambda q: one_hot(argmax(q), len(q)), draft, draft)
    neighbours = _drawn(lambda q: q, draft, other.draft)
    mutants = {
        "draw from p after a rejection": (target, draft, draw_from_target_rule),
        "unfiltered q in the ratio": (target, top_two, wrong_q),
        "argmax proposals, q in the ratio": (target, likeliest, wrong_q),
        "a proposal dropped when q is small": (target, draft, drop_small),
        "draft and correction share noise": (target, draft, shared_noise),
        "q of the next row": (target, draft, lambda p, q, x: residual_rule(p, [*q[1:], q[0]], x)),
        "p of the next row in the ratio": (target, draft, p_of_next_row),
        "bonus from the row before": (target, draft, bonus_from_row_before),
        "penalties counted once a round": (_penalised(target), draft, penalties_once),
        "q of a neighbouring row of the batch": (target, neighbours, wrong_q),
    }
    return [RuleMutant(name, *parts) for name, parts in mutants.items()]


def drop_small(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
    """A proposal with a small q is not worth a test: drop it and draw from p."""
    outcomes, reached = [], 1.0
    for p, q, x in zip(p_rows, q_rows, proposals, strict=False):
        accept = min(1.0, p[x] / q[x]) if q[x] >= SMALL_Q else 0.0
        after = _normalised(residual(p, q)) if q[x] >= SMALL_Q else p
        outcomes.append(Outcome(reached * (1 - accept), after))
        reached *= accept
    return [*outcomes, Outcome(reached, p_rows[len(proposals)])]


def shared_noise(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
    """The uniform that drew x by the inverse CDF of q draws the correction as well."""
    outcomes, reached = [], 1.0
    for p, q, x in zip(p_rows, q_rows, proposals, strict=False):
        accept = min(1.0, p[x] / q[x])
        outcomes.append(Outcome(reached * (1 - accept), _given_interval(_normalised(residual(p, q)), _interval(q, x))))
        reached *= accept
    return [*outcomes, Outcome(reached, p_rows[len(proposals)])]


def p_of_next_row(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
    """The test takes p one row late; the residual is right."""
    outcomes, reached = [], 1.0
    for i, (q, x) in enumerate(zip(q_rows, proposals, strict=True)):
        accept = min(1.0, p_rows[i + 1][x] / q[x])
        outcomes.append(Outcome(reached * (1 - accept), _normalised(residual(p_rows[i], q))))
        reached *= accept
    return [*outcomes, Outcome(reached, p_rows[len(proposals)])]


def bonus_from_row_before(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
    """What follows K accepted tokens is drawn from row K - 1."""
    *rejected, last = residual_rule(p_rows, q_rows, proposals)
    return [*rejected, Outcome(last.probability, p_rows[max(len(proposals) - 1, 0)])]


def penalties_once(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
    """Every row is penalised for what was emitted before the round, not for the proposals before it."""
    seen = [
        _normalised([p_x * math.exp(FREQUENCY_PENALTY * proposals[:i].count(x)) for x, p_x in enumerate(p)])
        for i, p in enumerate(p_rows)
    ]
    return residual_rule(seen, q_rows, proposals)


def _penalised(table: Table) -> Table:
    """A target under a frequency penalty on the whole context."""

    def law(context: Tokens) -> Law:
        weights = [p * math.exp(-FREQUENCY_PENALTY * context.count(x)) for x, p in enumerate(table(context))]
        return _normalised(weights)

    return law


class _Drawn(tuple[float, ...]):
    """A law that proposals are drawn from, with the law that a wrong rule takes for it."""

    used: Law


def _drawn(change: Callable[[Law], Law], draft: Table, used: Table) -> Table:
    """Proposals from the changed law of the draft, judged by another."""

    def law(context: Tokens) -> Law:
        drawn = _Drawn(change(draft(context)))
        drawn.used = used(context)
        return drawn

    return law


def wrong_q(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
    """`residual` with a q that the proposals were not drawn from."""
    used = [q.used if isinstance(q, _Drawn) else q for q in q_rows]
    return residual_rule(p_rows, used, proposals)


def _keep_two(law: Law) -> Law:
    kept = sorted(law, reverse=True)[:2]
    return _normalised([p if p in kept else 0.0 for p in law])


def _normalised(weights: Sequence[float]) -> Law:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _interval(law: Law, x: int) -> tuple[float, float]:
    before = math.fsum(law[:x])
    return before, before + law[x]


def _given_interval(law: Law, interval: tuple[float, float]) -> Law:
    """The law of the inverse CDF of a uniform that is known to lie in an interval."""
    low, high = interval
    overlaps = [
        max(0.0, min(high, end) - max(low, start)) for start, end in (_interval(law, x) for x in range(len(law)))
    ]
    return _normalised(overlaps)
