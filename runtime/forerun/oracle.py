"""What the sampling graphs are held to: the laws of acceptance in plain Python and float64.

    law         next-token probabilities, one for each token of the vocabulary
    context     the committed tokens, oldest first
    table       a language model: context -> law
    proposals   x_1 .. x_K; p_rows has a law for each of them and one more, q_rows one for each
    rule        a law of acceptance as probabilities in place of uniforms, so that it can be summed over

The first part makes the decisions of one round from given uniforms. The second enumerates all that can happen
over several rounds; it takes wrong rules as well, to show by how much they miss.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

BLOCK_LENGTH = 256

Law = Sequence[float]
Tokens = tuple[int, ...]
Table = Callable[[Tokens], Law]
Draw = Callable[[Sequence[float]], int]


class Outcome(NamedTuple):
    """One way in which a round can end: its probability, and the law of the token after the accepted ones."""

    probability: float
    next_law: Law


Rule = Callable[[Sequence[Law], Sequence[Law], Tokens], Sequence[Outcome]]
"""(p_rows, q_rows, proposals) -> for n = 0..K the outcome "n are accepted", given that these were proposed."""


def law_of(logits: Sequence[float], temperature: float) -> Law:
    """softmax(logits / temperature); at temperature 0 the one-hot of the argmax, lowest index on ties."""
    best = argmax(logits)
    if temperature == 0:
        return [float(token == best) for token in range(len(logits))]
    weights = [math.exp((logit - logits[best]) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def argmax(values: Sequence[float]) -> int:
    """The lowest index of the largest value."""
    return max(range(len(values)), key=values.__getitem__)


def inverse_cdf(weights: Sequence[float], uniforms: tuple[float, float]) -> int:
    """The token that two uniforms draw with probability weight / sum: the first picks its block of 256."""
    blocks = [weights[start : start + BLOCK_LENGTH] for start in range(0, len(weights), BLOCK_LENGTH)]
    block = _first_above([math.fsum(block) for block in blocks], uniforms[0])
    return block * BLOCK_LENGTH + _first_above(blocks[block], uniforms[1])


def _first_above(weights: Sequence[float], uniform: float) -> int:
    """The first index at which the prefix sum exceeds uniform * sum: never one whose weight is 0."""
    prefix = list(itertools.accumulate(weights))
    return next(index for index, mass in enumerate(prefix) if mass > uniform * prefix[-1])


def residual(p: Law, q: Law) -> Law:
    """ReLU(p - q), not normalised; p where that is 0 everywhere (no proposal of q is then ever rejected)."""
    positive = [max(p_x - q_x, 0.0) for p_x, q_x in zip(p, q, strict=True)]
    return positive if any(positive) else p


def acceptance_probability(p: Law, q: Law) -> float:
    """The chance that `residual` accepts a token drawn from q: sum min(p, q)."""
    return math.fsum(map(min, p, q))


def residual_step(
    p_rows: Sequence[Law],
    q_rows: Sequence[Law],
    proposals: Sequence[int],
    *,
    accept_uniforms: Sequence[float],
    draw: Draw,
) -> tuple[int, int]:
    """Accepted count and next token of one round (2211.17192, algorithm 1; 2302.01318, algorithm 2)."""
    for n, (p, q, x, u) in enumerate(zip(p_rows, q_rows, proposals, accept_uniforms, strict=False)):
        if not u * q[x] < p[x]:
            return n, draw(residual(p, q))
    return len(proposals), draw(p_rows[len(proposals)])


def greedy_step(logit_rows: Sequence[Sequence[float]], proposals: Sequence[int]) -> tuple[int, int]:
    """Accepted count and next token of one round at temperature 0."""
    best = [argmax(logits) for logits in logit_rows]
    n = next((n for n, x in enumerate(proposals) if x != best[n]), len(proposals))
    return n, best[n]


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


def plain_law(target: Table, *, positions: int, context: Tokens = ()) -> dict[Tokens, float]:
    """Joint law of the next `positions` tokens when the target decodes alone, without impossible ones."""
    if positions == 0:
        return {(): 1.0}
    return {
        (token, *rest): probability * rest_probability
        for token, probability in enumerate(target(context))
        if probability > 0
        for rest, rest_probability in plain_law(
            target, positions=positions - 1, context=(*context, token)
        ).items()
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


def _round_law(
    target: Table, draft: Table, rule: Rule, draft_length: int, context: Tokens
) -> dict[Tokens, float]:
    """Law of what one round emits: the accepted tokens and the next one."""
    emitted: dict[Tokens, float] = {}
    for proposals, proposed in plain_law(draft, positions=draft_length, context=context).items():
        prefixes = [context + proposals[:i] for i in range(draft_length + 1)]
        p_rows = [target(prefix) for prefix in prefixes]
        q_rows = [draft(prefix) for prefix in prefixes[:-1]]
        for n, (probability, next_law) in enumerate(rule(p_rows, q_rows, proposals)):
            for token, next_probability in enumerate(next_law):
                if mass := proposed * probability * next_probability:
                    tokens = (*proposals[:n], token)
                    emitted[tokens] = emitted.get(tokens, 0.0) + mass
    return emitted


def total_variation(a: Mapping[Tokens, float], b: Mapping[Tokens, float]) -> float:
    """Half the sum of |a - b|: the largest difference in the probability of any event."""
    return math.fsum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2
