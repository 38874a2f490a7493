"""Verification graphs that look right and are not, beside the right one: `verify-residual` with one mistake each."""

from collections.abc import Callable, Mapping
from typing import Any

from onnxscript import FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import (
    K_PLUS_1,
    B,
    K,
    V,
    formula,
    inverse_cdf,
    is_proposal,
    leading,
    probability,
    row_at,
)
from forerun_export.sampling.verification import correction_or_bonus, proposal_laws, verify_residual


@formula
def draw_from_p(
    p: FLOAT[B, K_PLUS_1, V],
    q: FLOAT[B, K, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """After a rejection p itself."""
    accepted, _ = verify_residual(p, q, tokens, valid, accept_uniforms, draw_uniforms)
    next_token = op.Squeeze(inverse_cdf(row_at(p, accepted), draw_uniforms), [1])
    return accepted, next_token


@formula
def _bonus_from_row_before(
    p: FLOAT[B, K_PLUS_1, V],
    q: FLOAT[B, K, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """The bonus comes from the law of the last proposal."""
    accepted, right = verify_residual(p, q, tokens, valid, accept_uniforms, draw_uniforms)
    early = row_at(p, op.Max(accepted - 1, 0))
    bonus = op.Squeeze(inverse_cdf(early, draw_uniforms), [1])
    next_token = op.Where(accepted == valid, bonus, right)
    return accepted, next_token


@formula
def _q_of_next_row(
    p: FLOAT[B, K_PLUS_1, V],
    q: FLOAT[B, K, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """Row i is judged by q of row i + 1."""
    shifted = op.Concat(q[:, 1:], q[:, :1], axis=1)
    accepted, next_token = verify_residual(p, shifted, tokens, valid, accept_uniforms, draw_uniforms)
    return accepted, next_token


@formula
def _q_of_neighbour(
    p: FLOAT[B, K_PLUS_1, V],
    q: FLOAT[B, K, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """A row of the batch is judged by the q of the next one."""
    other = op.Concat(q[1:], q[:1], axis=0)
    accepted, next_token = verify_residual(p, other, tokens, valid, accept_uniforms, draw_uniforms)
    return accepted, next_token


@formula
def _accept_at_equality(
    p: FLOAT[B, K_PLUS_1, V],
    q: FLOAT[B, K, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """u q <= p: lets a token through that the target rules out, once in 2^23."""
    counts = is_proposal(tokens, valid)
    x = op.Where(counts, tokens[:, 1:], 0)
    accepted = leading(op.And(counts, accept_uniforms * probability(q, x) <= proposal_laws(p, x)))
    rejected = accepted < valid
    p_n = row_at(p, accepted)
    q_n = row_at(q, op.Where(rejected, accepted, 0))
    next_token = correction_or_bonus(op.Relu(p_n - q_n), p_n, rejected, draw_uniforms)
    return accepted, next_token


WRONG_GRAPHS: Mapping[str, Callable[..., Any]] = {
    "draw from p after a rejection": draw_from_p,
    "bonus from the row before": _bonus_from_row_before,
    "q of the next row": _q_of_next_row,
    "q of a neighbouring row of the batch": _q_of_neighbour,
    "accepts where u q = p": _accept_at_equality,
}
