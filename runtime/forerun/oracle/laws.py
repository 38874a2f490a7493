"""The decisions of one round from given uniforms.

draw        weights -> a token, with probability weight / sum of weights
x, u        the proposals, and a uniform number in [0, 1) for each
"""

import itertools
import math
from collections.abc import Callable, Sequence

BLOCK_LENGTH = 256

Law = Sequence[float]
Tokens = tuple[int, ...]
Draw = Callable[[Sequence[float]], int]


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


def prefix_masses(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Sequence[int]) -> list[float]:
    """P_0 .. P_K of block verification: P_0 = 1, P_i = min(1, P_{i-1} p(x_i)/q(x_i))."""
    masses = [1.0]
    for p, q, x in zip(p_rows, q_rows, proposals, strict=False):
        masses.append(min(1.0, masses[-1] * (p[x] / q[x])))
    return masses


def block_residual(p: Law, q: Law, mass: float) -> Law:
    """ReLU(P p - q), not normalised; p where that is 0 everywhere."""
    return residual([mass * p_x for p_x in p], q) if any(mass * a > b for a, b in zip(p, q, strict=True)) else p


def block_acceptance(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Sequence[int]) -> list[float]:
    """h_1 .. h_K: the chance that the prefix of i proposals is kept if no longer one is (2403.10444, equation 4)."""
    masses = prefix_masses(p_rows, q_rows, proposals)
    chances = []
    for mass, p, q in zip(masses[1:-1], p_rows[1:], q_rows[1:], strict=False):
        s = math.fsum(max(mass * p_x - q_x, 0.0) for p_x, q_x in zip(p, q, strict=True))
        chances.append(s / (s + 1.0 - mass) if s + 1.0 - mass > 0 else 1.0)
    return [*chances, masses[-1]] if proposals else []


def block_step(
    p_rows: Sequence[Law],
    q_rows: Sequence[Law],
    proposals: Sequence[int],
    *,
    accept_uniforms: Sequence[float],
    draw: Draw,
) -> tuple[int, int]:
    """Accepted count and next token of one round of block verification (2403.10444, algorithm 2)."""
    chances = block_acceptance(p_rows, q_rows, proposals)
    kept = [i + 1 for i, (u, h) in enumerate(zip(accept_uniforms, chances, strict=False)) if u < h]
    n = max(kept, default=0)
    if n == len(proposals):
        return n, draw(p_rows[n])
    return n, draw(block_residual(p_rows[n], q_rows[n], prefix_masses(p_rows, q_rows, proposals)[n]))


def points_step(
    p_rows: Sequence[Law], proposals: Sequence[int], *, accept_uniforms: Sequence[float], draw: Draw
) -> tuple[int, int]:
    """`residual_step` of proposals that were not drawn: q is 1 at each."""
    q_rows = [one_hot(x, len(p)) for p, x in zip(p_rows, proposals, strict=False)]
    return residual_step(p_rows, q_rows, proposals, accept_uniforms=accept_uniforms, draw=draw)


def one_hot(token: int, vocabulary_size: int) -> Law:
    """The law of a proposal that was not drawn."""
    return [float(x == token) for x in range(vocabulary_size)]


def coupled_step(choices: Sequence[int], proposals: Sequence[int]) -> tuple[int, int]:
    """Accepted count and next token where `choices` are the K + 1 tokens that the target draws itself."""
    n = next((n for n, x in enumerate(proposals) if x != choices[n]), len(proposals))
    return n, choices[n]
