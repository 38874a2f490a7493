"""The sampling graphs: everything between logits and the accepted tokens, on the device.

    p, q      next-token law of target and draft, after the temperature
    tokens    [B,K+1]: column 0 is the pending token, columns 1..K the proposals x_1..x_K
    valid     [B]: how many proposals of a row count, 0..K; what lies behind them is never looked at

A row's outputs depend on that row's inputs alone.
"""

from onnxscript import FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import (
    K_PLUS_1,
    B,
    K,
    V,
    argmax,
    formula,
    inverse_cdf,
    is_proposal,
    law,
    leading,
    probability,
    row_at,
)


@formula
def draw(logits: FLOAT[B, 1, V], temperature: FLOAT[B], uniforms: FLOAT[B, 2]) -> INT64[B, 1]:
    """One token from the law of the logits."""
    token = inverse_cdf(law(logits, temperature), uniforms)
    return token  # noqa: RET504 (the name of the graph's output)


@formula
def draw_greedy(logits: FLOAT[B, 1, V]) -> INT64[B, 1]:
    """The most likely token."""
    token = argmax(logits)
    return token  # noqa: RET504 (the name of the graph's output)


@formula
def propose(
    logits: FLOAT[B, 1, V],
    temperature: FLOAT[B],
    uniforms: FLOAT[B, 2],
    step: INT64[B],
    q_in: FLOAT[B, K, V],
    tokens_in: INT64[B, K_PLUS_1],
) -> tuple[INT64[B, 1], FLOAT[B, K, V], INT64[B, K_PLUS_1]]:
    """Draft step i = 0..K-1: draw the next proposal from q_i and keep both, in place of *_in."""
    q = law(logits, temperature)
    token = inverse_cdf(q, uniforms)
    q_out = op.TensorScatter(q_in, q, step, axis=1)
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


@formula
def verify_residual(
    logits: FLOAT[B, K_PLUS_1, V],
    q: FLOAT[B, K, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    temperature: FLOAT[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """Accept x_i with probability min(1, p_i(x_i)/q_i(x_i)) up to the first rejection; then draw once more.

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2. At T = 0 both laws are
    one-hot and this is greedy verification.
    """
    p = law(logits, temperature)
    counts = is_proposal(tokens, valid)
    x = op.Where(counts, tokens[:, 1:], 0)
    q_x = probability(q, x)
    p_x = probability(p, op.Concat(x, x[:, :1], axis=1))[:, :-1]  # row K has no proposal: any token will do

    accepted = leading(op.And(counts, accept_uniforms * q_x < p_x))
    rejected = accepted < valid

    p_n = row_at(p, accepted)
    q_n = row_at(q, op.Where(rejected, accepted, 0))
    residual = op.Relu(p_n - q_n)
    correction = inverse_cdf(residual, draw_uniforms)
    bonus = inverse_cdf(p_n, draw_uniforms)
    # A rejection means p(x) < q(x), so p > q elsewhere. If rounding hides that, p and q are equal to within
    # float32, and so is any law between them: draw from p.
    has_residual = op.ReduceSum(residual, [1, 2], keepdims=0) > 0.0
    corrects = op.And(rejected, has_residual)
    next_token = op.Where(corrects, op.Squeeze(correction, [1]), op.Squeeze(bonus, [1]))
    return accepted, next_token


@formula
def verify_greedy(
    logits: FLOAT[B, K_PLUS_1, V], tokens: INT64[B, K_PLUS_1], valid: INT64[B]
) -> tuple[INT64[B], INT64[B]]:
    """Accept while x_i = y_i = argmax p_i, n times; emit y_n."""
    y = argmax(logits)
    counts = is_proposal(tokens, valid)
    accepted = leading(op.And(counts, tokens[:, 1:] == y[:, :-1]))
    next_token = op.Squeeze(op.GatherElements(y, op.Unsqueeze(accepted, [1]), axis=1), [1])
    return accepted, next_token
