"""Random inputs of the sampling graphs: laws of many shapes, ragged proposals, uniforms with their extremes."""

from typing import NamedTuple

import numpy as np

from forerun_export.certify.graph_sets import Array

Random = np.random.Generator

UNIFORM_STEP = 2.0**-23
TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 3.0)
PRIME = 2**31 - 1


class Shape(NamedTuple):
    """B rows, draft length K, V tokens."""

    rows: int
    draft_length: int
    vocabulary_size: int


def logits(rng: Random, *shape: int) -> Array:
    """float32 of several spreads; some rows have ties at the top, some tokens that are ruled out."""
    rows = rng.standard_normal(shape) * rng.choice([0.5, 3.0, 10.0], (*shape[:-1], 1))
    tied = np.minimum(rows, np.quantile(rows, 0.7, axis=-1, keepdims=True))
    ruled_out = np.where(rows >= np.median(rows, axis=-1, keepdims=True), rows, -np.inf)
    kind = rng.integers(0, 4, (*shape[:-1], 1))
    return np.where(kind == 0, tied, np.where(kind == 1, ruled_out, rows)).astype(np.float32)


def softmax(rows: Array) -> Array:
    """float32 laws of logits [..,V]."""
    weights = np.exp(rows.astype(np.float64) - rows.max(axis=-1, keepdims=True))
    law: Array = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
    return law


def uniforms(rng: Random, *shape: int, extremes: float = 0.05) -> Array:
    """Multiples of 2^-23 in [0, 1); a share of `extremes` is the smallest or the largest of them."""
    drawn = rng.integers(0, 2**23, shape) * UNIFORM_STEP
    ends = rng.choice([0.0, 1 - UNIFORM_STEP], shape)
    return np.where(rng.random(shape) < extremes, ends, drawn).astype(np.float32)


def noise_keys(rng: Random, rows: int) -> Array:
    """[B,2] in 0..PRIME-1."""
    return rng.integers(0, PRIME, (rows, 2))


def verification(rng: Random, shape: Shape) -> dict[str, Array]:
    """Inputs of every verification on laws: p and q related in many ways, garbage behind `valid`."""
    rows, width, size = shape
    of_p = logits(rng, rows, width + 1, size)
    blurred = of_p[:, :-1] + rng.standard_normal((rows, width, size)) * rng.choice([0.0, 0.3], (rows, 1, 1))
    of_q = np.where(rng.random((rows, 1, 1)) < 0.5, logits(rng, rows, width, size), blurred)
    p, q = softmax(of_p), softmax(of_q)
    valid = rng.integers(0, width + 1, rows)
    valid[rng.random(rows) < 0.5] = width
    tokens = np.zeros((rows, width + 1), np.int64)
    for b, k in np.ndindex(rows, width):
        tokens[b, k + 1] = _proposal(rng, q[b, k])
    for b in range(rows):
        q[b, valid[b] :] = rng.choice([np.nan, np.inf, -1.0, 7.0])
        p[b, valid[b] + 1 :] = rng.choice([np.nan, 0.0, 1.0])
        tokens[b, valid[b] + 1 :] = rng.choice([-1, 2**40, 0])
    return {
        "p": p,
        "q": q,
        "tokens": tokens,
        "valid": valid,
        "accept_uniforms": uniforms(rng, rows, width, extremes=0.3),
        "draw_uniforms": uniforms(rng, rows, 2),
        "noise_keys": noise_keys(rng, rows),
        "positions": rng.integers(0, 5000, (rows, 1)) + np.arange(width + 1),
    }


def _proposal(rng: Random, q: Array) -> int:
    """Mostly drawn from q, now and then any token that q allows."""
    if rng.random() < 0.9:
        prefix = np.cumsum(q, dtype=np.float64)
        return int(np.searchsorted(prefix, rng.random() * prefix[-1], side="right").clip(0, len(q) - 1))
    return int(rng.choice(np.flatnonzero(q)))


def greedy_verification(rng: Random, shape: Shape) -> dict[str, Array]:
    """Inputs of verify-greedy: seven proposals in ten are the argmax."""
    rows, width, size = shape
    found = logits(rng, rows, width + 1, size)
    best = found[:, :-1].argmax(-1)
    proposals = np.where(rng.random(best.shape) < 0.7, best, rng.integers(0, size, best.shape))
    tokens = np.concatenate([np.zeros((rows, 1), np.int64), proposals], axis=1)
    return {"logits": found, "tokens": tokens, "valid": rng.integers(0, width + 1, rows)}


def drawing(rng: Random, shape: Shape) -> dict[str, Array]:
    """Inputs of draw and propose: rows that draw by the inverse CDF and rows that race."""
    rows, width, size = shape
    return {
        "p": softmax(logits(rng, rows, 1, size)),
        "uniforms": uniforms(rng, rows, 2),
        "coupled": rng.random(rows) < 0.5,
        "noise_keys": noise_keys(rng, rows),
        "positions": rng.integers(0, 5000, (rows, 1)),
        "step": np.full(rows, rng.integers(0, width)),
        "q_in": softmax(logits(rng, rows, width, size)),
        "tokens_in": rng.integers(0, size, (rows, width + 1)),
    }


def shaping(rng: Random, shape: Shape) -> dict[str, Array]:
    """Inputs of the laws: logits, temperatures, filters on half of the rows."""
    rows, width, size = shape
    filtered = rng.random(rows) < 0.8
    return {
        "logits": logits(rng, rows, width + 1, size),
        "temperature": rng.choice(TEMPERATURES, rows).astype(np.float32),
        "top_k": np.where(filtered, rng.choice([0, 1, 3, 40, size], rows), 0),
        "top_p": np.where(filtered, rng.choice([1e-6, 0.3, 0.9, 1.0], rows), 1.0).astype(np.float32),
        "min_p": np.where(filtered, rng.choice([0.0, 0.05, 0.5, 1.0], rows), 0.0).astype(np.float32),
    }


def editing(rng: Random, shape: Shape) -> dict[str, Array]:
    """Inputs of edit: up to 8 tokens a place, padding repeats the first of them."""
    rows, width, size = shape
    places, count = (rows, width + 1), 8
    few = min(count, size)
    listed = np.argsort(rng.random((*places, size)), axis=-1)[..., :few]
    which = np.concatenate([np.arange(few), np.zeros(count - few, np.int64)])
    numbers = {
        "edit_bias": rng.choice([0.0, 1.5, -2.0], (*places, few)),
        "edit_penalty": rng.choice([1.0, 1.3, 0.8], (*places, few)),
        "edit_shift": rng.choice([0.0, 0.6, np.inf], (*places, few), p=[0.5, 0.4, 0.1]),
    }
    return {
        "logits": logits(rng, *places, size),
        "edit_tokens": listed[..., which],
        "only": rng.random(places) < 0.2,
        **{name: values[..., which].astype(np.float32) for name, values in numbers.items()},
    }
