"""The formulas that the sampling graphs are made of, as ONNX functions.

    B, R, K, V   rows of the batch, logit rows a row, draft length, vocabulary
    p            next-token law [B,R,V] after the temperature: float32, sums to 1 over V up to rounding
    u            uniform numbers in [0, 1), multiples of 2^-23

Each function is traced by onnxscript, not run: a Python operator stands for the ONNX operator of that name.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from onnxscript import BOOL, FLOAT, INT64, script
from onnxscript.onnx_opset import opset24 as op
from onnxscript.values import Opset

BLOCK_LENGTH = 256
FINE_LENGTH = 64
INFINITY = float("inf")

# Names of symbolic dimensions.
B, R, K, V = "B", "R", "K", "V"
K_PLUS_1, BLOCKS, FINE_BLOCKS = "K+1", "V/256", "V/64"

_P = ParamSpec("_P")
_T = TypeVar("_T")


def formula(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Trace `function` into an ONNX function of opset 24."""
    traced: Callable[_P, _T] = script(Opset("forerun.formulas", 1), default_opset=op)(function)
    return traced


@formula
def cut_into_blocks(rows: FLOAT[B, R, V], filler: FLOAT) -> FLOAT[B, R, BLOCKS, BLOCK_LENGTH]:
    """Blocks of 256 tokens; the last one is filled up with `filler` (a scalar)."""
    missing = op.Mod(-op.Shape(rows, start=2), BLOCK_LENGTH)
    padded = op.Pad(rows, op.Concat([0, 0, 0, 0, 0], missing, axis=0), filler)
    return op.Reshape(padded, [0, 0, -1, 256])


@formula
def missing_in(rows: FLOAT[B, R, V]) -> INT64[1]:
    """How many tokens the last block of 64 lacks: a constant outside of loops, in which the optimizer forgets V."""
    return op.Mod(-op.Shape(rows, start=2), FINE_LENGTH)


@formula
def cut_finely(rows: FLOAT[B, R, V], missing: INT64[1], filler: FLOAT) -> FLOAT[B, R, FINE_BLOCKS, FINE_LENGTH]:
    """Blocks of 64 tokens; the last one, in which so many are missing, is filled up with `filler` (a scalar)."""
    padded = op.Pad(rows, op.Concat([0, 0, 0, 0, 0], missing, axis=0), filler)
    return op.Reshape(padded, [0, 0, -1, 64])


@formula
def block_at(blocks: FLOAT[B, R, BLOCKS, BLOCK_LENGTH], index: INT64[B, R]) -> FLOAT[B, R, BLOCK_LENGTH]:
    """Block index[b,r] of each row."""
    return op.GatherND(blocks, op.Unsqueeze(index, [2]), batch_dims=2)


@formula
def row_at(rows: FLOAT[B, R, V], index: INT64[B]) -> FLOAT[B, 1, V]:
    """Row index[b] of each b."""
    return op.GatherND(rows, op.Unsqueeze(index, [1, 2]), batch_dims=1)


@formula
def probability(rows: FLOAT[B, R, V], tokens: INT64[B, R]) -> FLOAT[B, R]:
    """What each row gives to its token."""
    return op.Squeeze(op.GatherElements(rows, op.Unsqueeze(tokens, [2]), axis=2), [2])


@formula
def logarithm(x: FLOAT[...]) -> FLOAT[...]:
    """log x, to the same bits wherever x stands: a CPU's Log rounds the last few elements of a tensor otherwise."""
    return op.ReduceLogSum(op.Unsqueeze(x, [-1]), [-1], keepdims=0)


@formula
def argmax(logits: FLOAT[B, R, V]) -> INT64[B, R]:
    """The lowest index of the largest logit: the first block that holds it, then its first place there.

    In two stages because ArgMax runs on one core of a CPU, ReduceMax on all.
    """
    blocks = cut_finely(logits, missing_in(logits), -INFINITY)
    block = op.ArgMax(op.ReduceMax(blocks, [3], keepdims=0), axis=2, keepdims=0)
    offset = op.ArgMax(block_at(blocks, block), axis=2, keepdims=0)
    return block * FINE_LENGTH + offset


@formula
def law(logits: FLOAT[B, R, V], temperature: FLOAT[B]) -> FLOAT[B, R, V]:
    """p = softmax(logits / T) where T > 0; where T = 0 its limit, the one-hot of the argmax."""
    t = op.Unsqueeze(temperature, [1, 2])
    best = op.Unsqueeze(argmax(logits), [2])
    largest = op.GatherElements(logits, best, axis=2)
    # Subtracting before dividing keeps the digits that a small T magnifies. At T = 0 all fall to -infinity.
    reference = op.Where(t > 0.0, largest, INFINITY)
    scaled = (logits - reference) / op.Where(t > 0.0, t, 1.0)
    # The best logit is 0 at any T; writing it lifts it back at T = 0.
    return op.Softmax(op.ScatterElements(scaled, best, largest - largest, axis=2), axis=-1)


@formula
def first_above(weights: FLOAT[B, R, V], u: FLOAT[B, R]) -> INT64[B, R]:
    """The first x with F(x) > u, where F(x) = (w_0 + .. + w_x) / (w_0 + .. + w_last); 0 if all weights are 0.

    Summed in order, F does not rise at a weight of zero, and F(last) = 1 > u: a weight of zero is never chosen.
    """
    prefix = op.CumSum(weights, 2)
    cdf = prefix / prefix[:, :, -1:]
    return op.ArgMax(op.Cast(cdf > op.Unsqueeze(u, [2]), to=FLOAT.dtype), axis=2, keepdims=0)


@formula
def inverse_cdf(weights: FLOAT[B, 1, V], u: FLOAT[B, 2]) -> INT64[B, 1]:
    """Draw a token with probability weight / sum of weights: u_0 picks the block, u_1 the token within it.

    Two stages because the 2^23 values of one u, and float32 prefix sums over a whole vocabulary, are too coarse
    for its long tail. Total variation from the law of 49152 Zipf weights: 1e-3 with one stage, 1e-5 with two.
    """
    blocks = cut_into_blocks(weights, 0.0)
    block = first_above(op.ReduceSum(blocks, [3], keepdims=0), u[:, :1])
    offset = first_above(block_at(blocks, block), u[:, 1:])
    return block * BLOCK_LENGTH + offset


@formula
def is_proposal(tokens: INT64[B, K_PLUS_1], valid: INT64[B]) -> BOOL[B, K]:
    """Whether proposal i = 0..K-1 of a row counts (i < valid) or is padding."""
    columns = op.Squeeze(op.Shape(tokens, start=1), [0])
    return op.Range(0, columns - 1, 1) < op.Unsqueeze(valid, [1])


@formula
def leading(accepted: BOOL[B, K]) -> INT64[B]:
    """How many are accepted before the first that is not."""
    rejections = op.CumSum(op.Cast(op.Not(accepted), to=INT64.dtype), 1)
    return op.ReduceSum(op.Cast(rejections == 0, to=INT64.dtype), [1], keepdims=0)
