"""Drawing tokens: plain draws and a draft's proposals.

    p             next-token law [B,1,V], after all controls
    uniforms      [B,2]: for rows that draw by the inverse CDF
    coupled       [B]: rows that draw by the keyed race instead, with noise_keys and positions
    tokens        [B,K+1]: column 0 is the pending token, columns 1..K the proposals x_1..x_K

A row without a law (a NaN in p; NaN, +inf or nothing but -inf in logits) draws -1. A proposal must be a token, so there
it is 0; verification never accepts it under `residual` and `block`, because q is NaN.
"""

from onnxscript import BOOL, FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import K_PLUS_1, B, K, R, V, argmax, formula, inverse_cdf
from forerun_export.sampling.noise import race

INFINITY = float("inf")


@formula
def is_law(p: FLOAT[B, R, V]) -> BOOL[B, R]:
    """Whether p is one: what is wrong with a row's logits makes all of its softmax NaN."""
    return op.Not(op.IsNaN(op.Squeeze(p[:, :, :1], [2])))


@formula
def have_law(logits: FLOAT[B, R, V], best: INT64[B, R]) -> BOOL[B, R]:
    """Whether logits have a law, given their argmax: no NaN, which a sum would show, and a finite largest one."""
    largest = op.Squeeze(op.GatherElements(logits, op.Unsqueeze(best, [2]), axis=2), [2])
    total = op.ReduceSum(logits, [2], keepdims=0)
    return op.And(op.Not(op.IsNaN(total)), op.Abs(largest) < INFINITY)


@formula
def draw_from(
    p: FLOAT[B, 1, V],
    uniforms: FLOAT[B, 2],
    coupled: BOOL[B],
    noise_keys: INT64[B, 2],
    positions: INT64[B, 1],
) -> INT64[B, 1]:
    """A token of each row, by the inverse CDF or by the race."""
    drawn = inverse_cdf(p, uniforms)
    if op.ReduceMax(op.Cast(coupled, to=INT64.dtype), keepdims=0) > 0:
        token = op.Where(op.Unsqueeze(coupled, [1]), race(p, noise_keys, positions), drawn)
    else:
        token = op.Identity(drawn)
    return token


@formula
def draw(
    p: FLOAT[B, 1, V],
    uniforms: FLOAT[B, 2],
    coupled: BOOL[B],
    noise_keys: INT64[B, 2],
    positions: INT64[B, 1],
) -> INT64[B, 1]:
    """One token of each row."""
    token = op.Where(is_law(p), draw_from(p, uniforms, coupled, noise_keys, positions), -1)
    return token  # noqa: RET504 (the name of the graph's output)


@formula
def draw_greedy(logits: FLOAT[B, 1, V]) -> INT64[B, 1]:
    """The most likely token."""
    best = argmax(logits)
    token = op.Where(have_law(logits, best), best, -1)
    return token  # noqa: RET504 (the name of the graph's output)


@formula
def propose(
    p: FLOAT[B, 1, V],
    uniforms: FLOAT[B, 2],
    coupled: BOOL[B],
    noise_keys: INT64[B, 2],
    positions: INT64[B, 1],
    step: INT64[B],
    q_in: FLOAT[B, K, V],
    tokens_in: INT64[B, K_PLUS_1],
) -> tuple[INT64[B, 1], FLOAT[B, K, V], INT64[B, K_PLUS_1]]:
    """Draft step i = 0..K-1: draw the next proposal from the draft's law and keep both, in place of *_in."""
    token = op.Where(is_law(p), draw_from(p, uniforms, coupled, noise_keys, positions), 0)
    q_out = op.TensorScatter(q_in, p, step, axis=1)
    tokens_out = op.TensorScatter(tokens_in, token, step + 1, axis=1)
    return token, q_out, tokens_out


@formula
def propose_greedy(
    logits: FLOAT[B, 1, V], step: INT64[B], tokens_in: INT64[B, K_PLUS_1]
) -> tuple[INT64[B, 1], INT64[B, K_PLUS_1]]:
    """Draft step i = 0..K-1 at temperature 0, where the token says all about q."""
    token = argmax(logits)
    tokens_out = op.TensorScatter(tokens_in, token, step + 1, axis=1)
    return token, tokens_out
