"""For tests of joint laws: how well counts fit one, and a wrong rule that such a test must expose."""

import math
from collections.abc import Mapping

from onnxscript import FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun.oracle import Tokens
from forerun_export.sampling.building_blocks import K_PLUS_1, B, K, V, formula, inverse_cdf, row_at
from forerun_export.sampling.verification import verify_residual


def p_value(observed: Mapping[Tokens, int], expected: Mapping[Tokens, float]) -> float:
    """Of the G-test: the chance of a fit as bad as this if the law is `expected`; rare sequences share a cell."""
    total = sum(observed.values())
    cells = [(observed.get(key, 0), total * p) for key, p in expected.items() if total * p >= 5]
    rest = (total - sum(count for count, _ in cells), total - sum(mean for _, mean in cells))
    cells += [rest] if rest[1] >= 5 else []
    g = 2 * sum(count * math.log(count / mean) for count, mean in cells if count)
    return chi_square_tail(g, len(cells) - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Wilson and Hilferty 1931: the cube root of chi-square over its degrees of freedom is nearly normal."""
    spread = 2 / (9 * degrees)
    z = ((max(statistic, 0.0) / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


@formula
def verify_drawing_from_target(
    p: FLOAT[B, K_PLUS_1, V],
    q: FLOAT[B, K, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """verify_residual, but what follows a rejection is drawn from p itself."""
    accepted, _ = verify_residual(p, q, tokens, valid, accept_uniforms, draw_uniforms)
    next_token = op.Squeeze(inverse_cdf(row_at(p, accepted), draw_uniforms), [1])
    return accepted, next_token
