"""How far a decision is from the other one: what float32 explains, and what it does not.

margin      the smallest change of a uniform (or, in a race, of the logarithm of a score) that turns the oracle's
            decision into the graph's
bound       the largest change that stands for the rounding of the graph's float32 sums, products and logarithms
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from forerun.oracle import (
    BLOCK_LENGTH,
    RACE_BLOCK_LENGTH,
    Keys,
    Law,
    block_acceptance,
    exponential,
    noise,
    residual,
)

UNIT = 2.0**-24  # relative error of one float32 operation
RACE_BOUND = 1e-5  # series and logarithm of the noise, sums of a block, two divisions


class Margin(NamedTuple):
    """A margin and its bound."""

    margin: float
    bound: float

    @property
    def explained(self) -> bool:
        """Whether rounding explains the difference."""
        return self.margin <= self.bound or self.bound >= 1


IMPOSSIBLE = Margin(math.inf, 0.0)


class Threshold(NamedTuple):
    """A chance of acceptance h, and how far a graph's may be from it."""

    h: float
    error: float


def worst(margins: Sequence[Margin]) -> Margin:
    """The one that is hardest to explain."""
    return max(margins, key=lambda m: (not m.explained, m.margin), default=Margin(0.0, 0.0))


def residual_margin(
    p_rows: Sequence[Law],
    q_rows: Sequence[Law],
    proposals: Sequence[int],
    accept_uniforms: Sequence[float],
    pair: tuple[float, float],
    decision: tuple[int, int],
) -> Margin:
    """Of a decision of `residual` or of point proposals (q one-hot)."""
    n, token = decision
    if not 0 <= n <= len(proposals):
        return IMPOSSIBLE
    chances = [min(1.0, p[x] / q[x]) for p, q, x in zip(p_rows, q_rows, proposals, strict=False)]
    accepts = [Threshold(h, 2 * UNIT * h) for h in chances]
    margins = [_side(u, h, u_below=True) for u, h in zip(accept_uniforms[:n], accepts, strict=False)]
    weights = p_rows[n]
    if n < len(proposals):
        margins.append(_side(accept_uniforms[n], accepts[n], u_below=False))
        weights = residual(p_rows[n], q_rows[n])
    return worst([*margins, draw_margin(weights, pair, token)])


def block_margin(
    p_rows: Sequence[Law],
    q_rows: Sequence[Law],
    proposals: Sequence[int],
    accept_uniforms: Sequence[float],
    pair: tuple[float, float],
    decision: tuple[int, int],
) -> Margin:
    """Of a decision of `block`: the n-th test passes, and no later one."""
    n, token = decision
    if not 0 <= n <= len(proposals):
        return IMPOSSIBLE
    masses, errors = _masses(p_rows, q_rows, proposals)
    accepts = _block_thresholds(p_rows, q_rows, proposals, masses, errors)
    later = zip(accept_uniforms[n:], accepts[n:], strict=False)
    margins = [_side(u, h, u_below=False) for u, h in later]
    if n > 0:
        margins.append(_side(accept_uniforms[n - 1], accepts[n - 1], u_below=True))
    if n == len(proposals):
        return worst([*margins, draw_margin(p_rows[n], pair, token)])
    weights = [max(masses[n] * p - q, 0.0) for p, q in zip(p_rows[n], q_rows[n], strict=True)]
    if not any(weights):
        weights = list(p_rows[n])
    return worst([*margins, draw_margin(weights, pair, token, error=masses[n] * (errors[n] + 2 * UNIT))])


def _masses(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Sequence[int]) -> tuple[list[float], list[float]]:
    """P_0 .. P_K and their relative errors, which are those of sums of logarithms."""
    masses, errors = [1.0], [0.0]
    size = 0.0
    for p, q, x in zip(p_rows, q_rows, proposals, strict=False):
        masses.append(min(1.0, masses[-1] * (p[x] / q[x])))
        size += abs(math.log(p[x])) + abs(math.log(q[x])) if p[x] else 0.0
        errors.append(4 * UNIT * (1.0 + size))
    return masses, errors


def _block_thresholds(
    p_rows: Sequence[Law],
    q_rows: Sequence[Law],
    proposals: Sequence[int],
    masses: Sequence[float],
    errors: Sequence[float],
) -> list[Threshold]:
    """h = s / (s + 1 - P): the errors of s and P weigh as much as the denominator is small."""
    chances = block_acceptance(p_rows, q_rows, proposals)
    found = []
    for i, h in enumerate(chances[:-1], start=1):
        mass = masses[i]
        s = math.fsum(max(mass * p - q, 0.0) for p, q in zip(p_rows[i], q_rows[i], strict=True))
        error = mass * (errors[i] + 2 * UNIT) + 16 * UNIT * s
        found.append(Threshold(h, 2 * error / max(s + 1.0 - mass, error)))
    return [*found, *(Threshold(h, h * errors[-1]) for h in chances[-1:])]


def _side(u: float, threshold: Threshold, *, u_below: bool) -> Margin:
    """The test u < h must pass, or must not. It never passes for a token that the target rules out."""
    if u_below and threshold.h == threshold.error == 0:
        return IMPOSSIBLE
    distance = u - threshold.h if u_below else threshold.h - u
    return Margin(max(0.0, distance), threshold.error)


def draw_margin(weights: Sequence[float], pair: tuple[float, float], token: int, *, error: float = 0.0) -> Margin:
    """Of a draw by the inverse CDF; `error` is the absolute error of all weights together."""
    if not 0 <= token < len(weights):
        return IMPOSSIBLE
    block, offset = divmod(token, BLOCK_LENGTH)
    blocks = [weights[start : start + BLOCK_LENGTH] for start in range(0, len(weights), BLOCK_LENGTH)]
    sums = [math.fsum(part) for part in blocks]
    return worst([_stage(sums, pair[0], block, error), _stage(blocks[block], pair[1], offset, error)])


def _stage(weights: Sequence[float], u: float, index: int, error: float) -> Margin:
    prefix = list(itertools.accumulate(weights))
    total = prefix[-1]
    if not total:
        return IMPOSSIBLE
    bound = 2 * (UNIT * (len(weights) + 16) + error / total)
    if not weights[index]:
        return Margin(math.inf, bound)
    start, end = (prefix[index] - weights[index]) / total, prefix[index] / total
    return Margin(max(0.0, start - u, u - end), bound)


def race_margin(law: Law, keys: Keys, position: int, token: int) -> Margin:
    """Of a keyed draw: how far the scores of its block and of its token are behind the best."""
    if not 0 <= token < len(law) or not law[token]:
        return IMPOSSIBLE
    block, offset = divmod(token, RACE_BLOCK_LENGTH)
    blocks = [law[start : start + RACE_BLOCK_LENGTH] for start in range(0, len(law), RACE_BLOCK_LENGTH)]
    stages = (([math.fsum(part) for part in blocks], 0, block), (blocks[block], 1, offset))
    behind = [_behind(weights, keys, position, stage, index) for weights, stage, index in stages]
    return Margin(max(behind), RACE_BOUND)


def _behind(weights: Sequence[float], keys: Keys, position: int, stage: int, index: int) -> float:
    scores = [
        math.log(weight) - math.log(exponential(noise(keys, position, stage, i))) if weight else -math.inf
        for i, weight in enumerate(weights)
    ]
    return max(scores) - scores[index]
