"""Runs sampling graphs on numpy arrays, and says which of their decisions float32 rounding may change."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
from numpy.typing import NDArray

from forerun.backends.ort import session_options
from forerun.oracle import BLOCK_LENGTH, law_of

Array = NDArray[Any]
Random = np.random.Generator

UNIFORM_STEP = 2.0**-23
LARGEST_UNIFORM = 1 - UNIFORM_STEP

# Errors of a float32 probability. Relative: exp(d) with |d| <= 87 carries 87 * 2^-23, sum and division less.
# Absolute: near the smallest number that float32 holds.
ROUNDING = 2e-5
UNDERFLOW = 1e-43


def session_of(model: onnx_ir.Model) -> onnxruntime.InferenceSession:
    """A CPU session, silent about the copies that TensorScatter makes when not bound in place."""
    content = onnx_ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(content, session_options(), providers=["CPUExecutionProvider"])


def uniforms(rng: Random, *shape: int, extremes: float = 0.0) -> Array:
    """Multiples of 2^-23 in [0, 1), float32; a share of `extremes` is the smallest or the largest."""
    drawn = rng.integers(0, 2**23, shape) * UNIFORM_STEP
    extreme = rng.choice([0.0, LARGEST_UNIFORM], shape)
    return np.where(rng.random(shape) < extremes, extreme, drawn).astype(np.float32)


def laws(logits: Array, temperature: float) -> list[list[float]]:
    """The oracle's law of each row of [R,V] logits, to the nearest float32: what underflows there is 0 here."""
    rows = [law_of(row, temperature) for row in logits.astype(np.float64).tolist()]
    return [[float(p) for p in row] for row in np.array(rows, np.float32)]


def near(weights: Sequence[float], errors: Sequence[float], pair: Sequence[float]) -> set[int]:
    """Tokens that two uniforms may draw if each weight is off by up to its error."""
    starts = range(0, len(weights), BLOCK_LENGTH)
    block_weights = [sum(weights[start : start + BLOCK_LENGTH]) for start in starts]
    block_errors = [sum(errors[start : start + BLOCK_LENGTH]) for start in starts]
    tokens = set()
    for block in _near_in_one_stage(block_weights, block_errors, pair[0]):
        part = slice(block * BLOCK_LENGTH, (block + 1) * BLOCK_LENGTH)
        offsets = _near_in_one_stage(weights[part], errors[part], pair[1])
        tokens |= {block * BLOCK_LENGTH + offset for offset in offsets}
    return tokens


def _near_in_one_stage(weights: Sequence[float], errors: Sequence[float], uniform: float) -> list[int]:
    weight, error = np.asarray(weights), np.asarray(errors)
    prefix, total = np.cumsum(weight), max(float(np.sum(weight)), UNDERFLOW)
    slack = 2 * float(np.sum(error)) / total + 4e-7
    above = prefix / total > uniform - slack
    below = (prefix - weight) / total <= uniform + slack
    return [int(x) for x in np.flatnonzero(above & below & (weight + error > 0))]


def error(p: float) -> float:
    """By how much a graph may miss a probability: not at all if it is 0."""
    return ROUNDING * p + UNDERFLOW if p > 0 else 0.0


def near_draw(p: Sequence[float], pair: Sequence[float]) -> set[int]:
    """Tokens that may be drawn from p."""
    return near(p, [error(x) for x in p], pair)


def near_correction(p: Sequence[float], q: Sequence[float], pair: Sequence[float]) -> set[int]:
    """Tokens that may be drawn from ReLU(p - q), given q exactly."""
    weights = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    errors = [error(a) if a + error(a) > b else 0.0 for a, b in zip(p, q, strict=True)]
    return near(weights, errors, pair)


def near_residual_step(
    p_rows: Sequence[Sequence[float]],
    q_rows: Sequence[Sequence[float]],
    proposals: Sequence[int],
    accept_uniforms: Sequence[float],
    pair: Sequence[float],
) -> Callable[[int, int], bool]:
    """Whether rounding of p may lead to (accepted count, next token)."""

    def may(n: int, token: int) -> bool:
        ratios = [(u * q[x], p[x]) for p, q, x, u in zip(p_rows, q_rows, proposals, accept_uniforms, strict=False)]
        if not all(a < b + error(b) for a, b in ratios[:n]):
            return False
        if n == len(proposals):
            return token in near_draw(p_rows[n], pair)
        a, b = ratios[n]
        return a >= b - error(b) and token in near_correction(p_rows[n], q_rows[n], pair)

    return may
