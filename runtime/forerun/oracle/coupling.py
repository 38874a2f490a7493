"""The `coupled` law: the keyed noise, the race that draws with it, and how two races of one noise hang together.

    keys        two integers in 0..PRIME-1: what a seed becomes
    position    the place of the token that is drawn
    stage       0 for the race between blocks, 1 for the race between the tokens of the block that won

This is the definition of the noise; the graphs compute the same integers.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from forerun.oracle.laws import Law

PRIME = 2**31 - 1
PI_DIGITS = (141592653, 589793238, 462643383, 279502884, 197169399, 375105820)
RACE_BLOCK_LENGTH = 64
BLOCK_STAGE, TOKEN_STAGE = 0, 1

Keys = tuple[int, int]


def fifth_power(x: int) -> int:
    """x^5 modulo PRIME: a permutation, since 5 does not divide PRIME - 1."""
    return pow(x, 5, PRIME)


def stream(keys: Keys, position: int, stage: int) -> tuple[int, int]:
    """Where the noise of a draw starts: (position, stage) enciphered by six rounds of a Feistel network."""
    left, right = position % PRIME, stage
    for number, digits in enumerate(PI_DIGITS):
        left, right = right, (left + fifth_power(right + keys[number % 2] + digits)) % PRIME
    return left, right


def noise(keys: Keys, position: int, stage: int, index: int) -> int:
    """An integer in 0..PRIME-1 for each index of a race."""
    left, right = stream(keys, position, stage)
    return fifth_power(fifth_power(index + left) + right)


def exponential(number: int) -> float:
    """-log(1 - w) for the uniform w = (number + 1/2) / PRIME."""
    return -math.log1p(-(number + 0.5) / PRIME)


def race(weights: Sequence[float], keys: Keys, position: int, stage: int) -> int:
    """The index with the least exponential / weight: it wins with probability weight / sum of weights."""
    left, right = stream(keys, position, stage)

    def score(index: int) -> float:
        return weights[index] / exponential(fifth_power(fifth_power(index + left) + right))

    return max(range(len(weights)), key=score)


def keyed_draw(law: Law, keys: Keys, position: int) -> int:
    """The token that these keys draw at this position: a race between blocks, then one within the winner."""
    blocks = blocks_of(law, RACE_BLOCK_LENGTH)
    block = race([math.fsum(weights) for weights in blocks], keys, position, BLOCK_STAGE)
    return block * RACE_BLOCK_LENGTH + race(blocks[block], keys, position, TOKEN_STAGE)


def blocks_of(law: Law, block_length: int) -> list[Law]:
    """A law cut into blocks."""
    return [law[start : start + block_length] for start in range(0, len(law), block_length)]


def joint_race(p: Law, q: Law, y: int, x: int, *, block_length: int = RACE_BLOCK_LENGTH) -> float:
    """The chance that keys draw y from p and x from q: block by block, then token by token."""
    p_blocks, q_blocks = blocks_of(p, block_length), blocks_of(q, block_length)
    (y_block, y_offset), (x_block, x_offset) = divmod(y, block_length), divmod(x, block_length)
    p_inside, q_inside = p_blocks[y_block], q_blocks[x_block]
    if not p[y] or not q[x]:
        return 0.0
    size = min(block_length, max(len(p_inside), len(q_inside)))
    between = joint_flat_race(
        [math.fsum(block) for block in p_blocks], [math.fsum(block) for block in q_blocks], y_block, x_block
    )
    within = joint_flat_race(_padded(p_inside, size), _padded(q_inside, size), y_offset, x_offset)
    return between * within


def joint_flat_race(p: Law, q: Law, y: int, x: int) -> float:
    """The chance that one race over all tokens has winner y for weights p and x for weights q (any totals).

    If the winner of q comes at time a, that of p at a t, then nothing else has come with probability exp(-a M(t)),
    M(t) = sum of max(q, t p); so the chance is p_y q_x times the integral of 1/M^2 over the t that y and x allow.
    M is linear between the ratios q/p, and there the integral is (t_2 - t_1) / (M(t_1) M(t_2)).
    """
    p, q = _scaled(p), _scaled(q)
    if not p[y] or not q[x]:
        return 0.0
    if x == y:
        return 1.0 / math.fsum(max(p_i / p[y], q_i / q[y]) for p_i, q_i in zip(p, q, strict=True))
    low, high = q[y] / p[y], q[x] / p[x] if p[x] else math.inf
    if low >= high:
        return 0.0
    ratios = {q_i / p_i for p_i, q_i in zip(p, q, strict=True) if p_i}
    corners = sorted({low, *(t for t in ratios if low < t < high), high})
    return p[y] * q[x] * math.fsum(_piece(p, q, *pair) for pair in pairwise(corners))


def _piece(p: Law, q: Law, start: float, end: float) -> float:
    """The integral of 1/M^2 where M is linear; up to infinity, M grows by the sum of p."""
    first = math.fsum(max(q_i, start * p_i) for p_i, q_i in zip(p, q, strict=True))
    if end == math.inf:
        return 1.0 / (math.fsum(p) * first)
    return (end - start) / (first * math.fsum(max(q_i, end * p_i) for p_i, q_i in zip(p, q, strict=True)))


def match_probability(p: Law, q: Law, *, block_length: int = RACE_BLOCK_LENGTH) -> float:
    """The chance that the same keys draw the same token from p and from q: the acceptance of `coupled`."""
    return math.fsum(joint_race(p, q, x, x, block_length=block_length) for x in range(len(p)) if p[x] and q[x])


def _padded(law: Law, size: int) -> Law:
    return [*law, *[0.0] * (size - len(law))]


def _scaled(weights: Law) -> Law:
    total = math.fsum(weights)
    return [weight / total for weight in weights]
