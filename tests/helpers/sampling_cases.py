"""Random inputs of the sampling graphs."""

import numpy as np

from forerun.oracle import inverse_cdf
from helpers.sampling import Array, Random, laws, uniforms

TEMPERATURES = [0.0, 1e-4, 0.7, 1.0, 100.0]


def make_logits(rng: Random, *shape: int) -> Array:
    """Logits of several spreads, some rows with ties at the top, some with tokens that are ruled out."""
    rows = rng.standard_normal(shape) * rng.choice([0.5, 3.0, 10.0], (*shape[:-1], 1))
    tied = np.minimum(rows, np.quantile(rows, 0.7, axis=-1, keepdims=True))
    ruled_out = np.where(rows >= np.median(rows, axis=-1, keepdims=True), rows, -np.inf)
    kind = rng.integers(0, 4, (*shape[:-1], 1))
    return np.where(kind == 0, tied, np.where(kind == 1, ruled_out, rows)).astype(np.float32)


def verification(rng: Random, batch: int, draft_length: int, vocabulary_size: int) -> dict[str, Array]:
    """Inputs of verify-residual: proposals mostly drawn from q, ragged, with garbage behind `valid`."""
    temperature = rng.choice(TEMPERATURES, batch).astype(np.float32)
    logits = make_logits(rng, batch, draft_length + 1, vocabulary_size)
    draft_logits = np.where(
        rng.random((batch, 1, 1)) < 0.5,
        make_logits(rng, batch, draft_length, vocabulary_size),
        logits[:, :-1],
    )
    draft_logits = draft_logits + rng.standard_normal(draft_logits.shape) * rng.choice([0, 0.3], (batch, 1, 1))
    q = np.array([laws(row, float(t)) for row, t in zip(draft_logits, temperature, strict=True)], np.float32)
    tokens = np.zeros((batch, draft_length + 1), np.int64)
    for b, k in np.ndindex(batch, draft_length):
        likely = inverse_cdf(q[b, k].tolist(), (rng.random(), rng.random()))
        tokens[b, k + 1] = likely if rng.random() < 0.9 else rng.choice(np.flatnonzero(q[b, k]))
    valid = rng.integers(0, draft_length + 1, batch)
    for b in range(batch):
        q[b, valid[b] :] = rng.choice([np.nan, np.inf, -1.0, 7.0])
        tokens[b, valid[b] + 1 :] = rng.choice([-1, 2**40, 0])
    return {
        "logits": logits,
        "q": q,
        "tokens": tokens,
        "valid": valid,
        "temperature": temperature,
        "accept_uniforms": uniforms(rng, batch, draft_length),
        "draw_uniforms": uniforms(rng, batch, 2, extremes=0.05),
    }


def greedy_verification(rng: Random, batch: int, draft_length: int, vocabulary_size: int) -> dict[str, Array]:
    """Inputs of verify-greedy: proposals of which seven in ten are the argmax, ragged."""
    logits = make_logits(rng, batch, draft_length + 1, vocabulary_size)
    best = logits[:, :-1].argmax(-1)
    other = rng.integers(0, vocabulary_size, best.shape)
    proposals = np.where(rng.random(best.shape) < 0.7, best, other)
    tokens = np.concatenate([np.zeros((batch, 1), np.int64), proposals], axis=1)
    return {"logits": logits, "tokens": tokens, "valid": rng.integers(0, draft_length + 1, batch)}
