"""All that can happen over several rounds, summed: exact laws, without sampling.

table       a language model: context -> law
context     the committed tokens, oldest first
rule        a law of acceptance as probabilities in place of uniforms; wrong rules as well, to show how much they miss
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from forerun.oracle.coupling import RACE_BLOCK_LENGTH, joint_race
from forerun.oracle.laws import (
    Law,
    Tokens,
    block_acceptance,
    block_residual,
    prefix_masses,
    residual,
)

Table = Callable[[Tokens], Law]


class Outcome(NamedTuple):
    """One way in which a round can end: its probability, and the law of the token after the accepted ones."""

    probability: float
    next_law: Law


Rule = Callable[[Sequence[Law], Sequence[Law], Tokens], Sequence[Outcome]]
"""(p_rows, q_rows, proposals) -> for n = 0..K the outcome "n are accepted", given that these were proposed."""


def residual_rule(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
    """Accept with probability min(1, p/q), then draw from ReLU(p - q)."""
    return _accept_in_turn(p_rows, q_rows, proposals, after_rejection=residual)


def draw_from_target_rule(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
    """Accept with probability min(1, p/q), then draw from p: looks right, and is biased."""
    return _accept_in_turn(p_rows, q_rows, proposals, after_rejection=lambda p, q: p)


def _accept_in_turn(
    p_rows: Sequence[Law],
    q_rows: Sequence[Law],
    proposals: Tokens,
    *,
    after_rejection: Callable[[Law, Law], Law],
) -> list[Outcome]:
    outcomes, reached = [], 1.0
    for p, q, x in zip(p_rows, q_rows, proposals, strict=False):
        accept = min(1.0, p[x] / q[x])
        outcomes.append(Outcome(reached * (1.0 - accept), _normalised(after_rejection(p, q))))
        reached *= accept
    return [*outcomes, Outcome(reached, p_rows[len(proposals)])]


def _normalised(weights: Sequence[float]) -> Law:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def block_rule(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
    """Keep the longest prefix i with u_i < h_i, then draw from ReLU(P_i p - q)."""
    masses = prefix_masses(p_rows, q_rows, proposals)
    chances = [1.0, *block_acceptance(p_rows, q_rows, proposals)]
    outcomes, no_longer = [Outcome(chances[-1], p_rows[len(proposals)])], 1.0 - chances[-1]
    for n in reversed(range(len(proposals))):
        next_law = _normalised(block_residual(p_rows[n], q_rows[n], masses[n]))
        outcomes.append(Outcome(no_longer * chances[n], next_law))
        no_longer *= 1.0 - chances[n]
    return outcomes[::-1]


def coupled_rule(
    p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens, *, block_length: int = RACE_BLOCK_LENGTH
) -> list[Outcome]:
    """Accept while the target's race has the draft's winner, then emit the target's."""
    outcomes, reached = [], 1.0
    for p, q, x in zip(p_rows, q_rows, proposals, strict=False):
        both = [joint_race(p, q, y, x, block_length=block_length) / q[x] for y in range(len(p))]
        other = [0.0 if y == x else mass for y, mass in enumerate(both)]
        outcomes.append(Outcome(reached * math.fsum(other), _normalised(other) if any(other) else p))
        reached *= both[x]
    return [*outcomes, Outcome(reached, p_rows[len(proposals)])]


def plain_law(target: Table, *, positions: int, context: Tokens = ()) -> dict[Tokens, float]:
    """Joint law of the next `positions` tokens when the target decodes alone, without impossible ones."""
    if positions == 0:
        return {(): 1.0}
    return {
        (token, *rest): probability * rest_probability
        for token, probability in enumerate(target(context))
        if probability > 0
        for rest, rest_probability in plain_law(target, positions=positions - 1, context=(*context, token)).items()
    }


def joint_law(
    target: Table, draft: Table, rule: Rule, *, draft_length: int, positions: int, context: Tokens = ()
) -> dict[Tokens, float]:
    """Joint law of the next `positions` tokens of speculative decoding, across as many rounds as they take.

    Exact: a sum over all proposals, accepted counts and next tokens. Grows as V^(K + 1) for each context.
    """
    if positions == 0:
        return {(): 1.0}
    emitted: dict[Tokens, float] = {}
    for tokens, probability in _round_law(target, draft, rule, draft_length, context).items():
        committed = tokens[:positions]
        later = joint_law(
            target,
            draft,
            rule,
            draft_length=draft_length,
            positions=positions - len(committed),
            context=context + committed,
        )
        for rest, rest_probability in later.items():
            sequence = committed + rest
            emitted[sequence] = emitted.get(sequence, 0.0) + probability * rest_probability
    return emitted


def _round_law(target: Table, draft: Table, rule: Rule, draft_length: int, context: Tokens) -> dict[Tokens, float]:
    """Law of what one round emits: the accepted tokens and the next one."""
    emitted: dict[Tokens, float] = {}
    for proposals, proposed in plain_law(draft, positions=draft_length, context=context).items():
        p_rows, q_rows = _rows(target, draft, proposals, context)
        for n, (probability, next_law) in enumerate(rule(p_rows, q_rows, proposals)):
            for token, next_probability in enumerate(next_law):
                if mass := proposed * probability * next_probability:
                    tokens = (*proposals[:n], token)
                    emitted[tokens] = emitted.get(tokens, 0.0) + mass
    return emitted


def _rows(target: Table, draft: Table, proposals: Tokens, context: Tokens) -> tuple[list[Law], list[Law]]:
    prefixes = [context + proposals[:i] for i in range(len(proposals) + 1)]
    return [target(prefix) for prefix in prefixes], [draft(prefix) for prefix in prefixes[:-1]]


def total_variation(a: Mapping[Tokens, float], b: Mapping[Tokens, float]) -> float:
    """Half the sum of |a - b|: the largest difference in the probability of any event."""
    return math.fsum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


def expected_accepted(target: Table, draft: Table, rule: Rule, *, draft_length: int, context: Tokens = ()) -> float:
    """How many proposals of one round a rule accepts on average."""
    mean = 0.0
    for proposals, proposed in plain_law(draft, positions=draft_length, context=context).items():
        p_rows, q_rows = _rows(target, draft, proposals, context)
        outcomes = rule(p_rows, q_rows, proposals)
        mean += proposed * math.fsum(n * outcome.probability for n, outcome in enumerate(outcomes))
    return mean


def expected_tokens(acceptance: float, draft_length: int) -> float:
    """Tokens a round of `residual` if each proposal is accepted alike: (1 - a^(K+1)) / (1 - a), 2211.17192 eq. 1."""
    return math.fsum(acceptance**n for n in range(draft_length + 1))
