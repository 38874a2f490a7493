"""Keyed noise from integer arithmetic, and the races that draw a token with it.

    PRIME         2^31 - 1; the noise is made of integers 0..PRIME-1, so that products stay below 2^63
    noise_keys    [B,2] in 0..PRIME-1: what a seed becomes
    positions     [B,R]: the place of the token that is drawn
    stage         0 for the race between blocks, 1 for the race between the tokens of a block
    stream        [B,R,1] twice: where the noise of one (keys, position, stage) starts

`forerun.oracle.noise` has the same definition in Python's integers. Add, Mul and Mod of signed integers only: CUDA and
TensorRT have no shifts, no bit operations and no unsigned integers.
"""

from onnxscript import FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import (
    FINE_LENGTH,
    B,
    R,
    V,
    block_at,
    cut_finely,
    formula,
    logarithm,
    missing_in,
)

PRIME = 2**31 - 1
# Digits of pi, nine at a time: round constants that nobody chose.
PI_1, PI_2, PI_3, PI_4, PI_5, PI_6 = 141592653, 589793238, 462643383, 279502884, 197169399, 375105820

SERIES_BELOW = 2.0**-6
HALF, THIRD, QUARTER = 1 / 2, 1 / 3, 1 / 4

N = "N"


@formula
def fifth_power(x: INT64[...]) -> INT64[...]:
    """x^5 modulo PRIME: a permutation of 0..PRIME-1, since 5 does not divide PRIME - 1."""
    x = op.Mod(x, PRIME)
    square = op.Mod(x * x, PRIME)
    return op.Mod(op.Mod(square * square, PRIME) * x, PRIME)


@formula
def feistel_round(left: INT64[...], right: INT64[...], key: INT64[...]) -> tuple[INT64[...], INT64[...]]:
    """Invertible whatever the key."""
    return op.Identity(right), op.Mod(left + fifth_power(right + key), PRIME)


@formula
def streams(noise_keys: INT64[B, 2], positions: INT64[B, R]) -> tuple[INT64[B, R, 2], INT64[B, R, 2]]:
    """(position, stage) enciphered under the keys, for both stages: no two streams of a seed coincide."""
    even, odd = op.Unsqueeze(noise_keys[:, :1], [2]), op.Unsqueeze(noise_keys[:, 1:], [2])
    position, stage = op.Mod(op.Unsqueeze(positions, [2]), PRIME), op.Constant(value_ints=[0, 1])
    left, right = feistel_round(position, stage, even + PI_1)
    left, right = feistel_round(left, right, odd + PI_2)
    left, right = feistel_round(left, right, even + PI_3)
    left, right = feistel_round(left, right, odd + PI_4)
    left, right = feistel_round(left, right, even + PI_5)
    left, right = feistel_round(left, right, odd + PI_6)
    return left, right


@formula
def exponential(noise: INT64[B, R, N]) -> FLOAT[B, R, N]:
    """-log(1 - w) of w = (noise + 1/2) / PRIME: exponentially distributed, never 0 or infinite.

    Small ones win races, so they keep their relative precision: the series replaces log(1 - w) for small w.
    """
    w = (op.Cast(noise, to=FLOAT.dtype) + 0.5) / 2147483647.0
    rest = (op.Cast(PRIME - 1 - noise, to=FLOAT.dtype) + 0.5) / 2147483647.0
    series = w * (1.0 + w * (HALF + w * (THIRD + w * QUARTER)))
    return op.Where(w < SERIES_BELOW, series, -logarithm(rest))


@formula
def winner(weights: FLOAT[B, R, N], left: INT64[B, R, 1], right: INT64[B, R, 1]) -> INT64[B, R]:
    """The race that index i wins with probability weight_i / sum of weights: the least E_i / weight_i.

    E_i is exponential, from the stream's noise ((i + left)^5 + right)^5. A weight of zero never wins.
    """
    index = op.Range(0, op.Squeeze(op.Shape(weights, start=2), [0]), 1)
    noise = fifth_power(fifth_power(index + left) + right)
    # Largest weight 1: then the winner's score is no subnormal number, however small the weights.
    relative = weights / op.ReduceMax(weights, [2], keepdims=1)
    return op.ArgMax(relative / exponential(noise), axis=2, keepdims=0)


@formula
def race(p: FLOAT[B, R, V], noise_keys: INT64[B, 2], positions: INT64[B, R]) -> INT64[B, R]:
    """One token of each row: a race between blocks of 64, then one within the block that won.

    Exact, as the law is that of the block times that of the token within it. One race over all tokens would need V
    numbers, not V/64 + 64; draft and target would then agree a little more often (1 to 7% more on real pairs).
    """
    left, right = streams(noise_keys, positions)
    blocks = cut_finely(p, missing_in(p), 0.0)
    block = winner(op.ReduceSum(blocks, [3], keepdims=0), left[:, :, :1], right[:, :, :1])
    offset = winner(block_at(blocks, block), left[:, :, 1:], right[:, :, 1:])
    return block * FINE_LENGTH + offset
