"""Runs the stage graphs of sampling on numpy arrays, with inputs that are laws in place of logits."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import onnxruntime

from forerun.oracle import block_acceptance, block_step, inverse_cdf, points_step, residual_step
from forerun_export.sampling.saving import sampling_model
from forerun_export.sampling.stages import SAMPLING_GRAPHS
from helpers.sampling import (
    UNDERFLOW,
    Array,
    Random,
    error,
    laws,
    near,
    near_correction,
    near_draw,
    session_of,
    uniforms,
)
from helpers.sampling_cases import verification

PRIME = 2**31 - 1
TYPES: Mapping[str, Any] = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}

Row = Mapping[str, Any]
Step = tuple[int, int]


@cache
def stage(name: str, vocabulary_size: int) -> onnxruntime.InferenceSession:
    """The session of a stage graph, built once."""
    return session_of(sampling_model(SAMPLING_GRAPHS[name], vocabulary_size))


def run_session(graph: onnxruntime.InferenceSession, feeds: Mapping[str, Any]) -> dict[str, Array]:
    """Outputs by name; inputs are picked by name and converted to the types that the graph takes."""
    converted = {spec.name: np.asarray(feeds[spec.name], TYPES[spec.type]) for spec in graph.get_inputs()}
    names = [spec.name for spec in graph.get_outputs()]
    return dict(zip(names, graph.run(names, converted), strict=True))


def run_stage(name: str, **feeds: Any) -> dict[str, Array]:
    """Outputs of a stage by name; the vocabulary is that of `p` or `logits`."""
    rows = feeds["p"] if "p" in feeds else feeds["logits"]
    return run_session(stage(name, rows.shape[-1]), feeds)


def noise_keys(rng: Random, batch: int) -> Array:
    return rng.integers(0, PRIME, (batch, 2))


def random_laws(rng: Random, *shape: int, zeros: float = 0.3) -> Array:
    """Laws [..,V] with long tails, some with zeros, some with most of their mass on one token."""
    weights = np.exp(rng.standard_normal(shape) * rng.choice([0.5, 2.0, 6.0], (*shape[:-1], 1)))
    kept = rng.random(shape) >= zeros * (rng.random((*shape[:-1], 1)) < 0.5)
    kept[..., 0] |= ~kept.any(-1)
    weights = weights * kept
    drawn: Array = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    return drawn


def law_verification(rng: Random, batch: int, draft_length: int, vocabulary_size: int) -> dict[str, Array]:
    """Inputs of every verifying stage: proposals mostly drawn from q, ragged, with garbage behind `valid`."""
    inputs = verification(rng, batch, draft_length, vocabulary_size)
    temperatures = inputs["temperature"].tolist()
    p = [laws(rows, t) for rows, t in zip(inputs["logits"], temperatures, strict=True)]
    positions = rng.integers(0, 10**6, (batch, 1)) + np.arange(draft_length + 1)
    return {
        **inputs,
        "p": np.array(p, np.float32),
        "noise_keys": noise_keys(rng, batch),
        "positions": positions,
    }


def row_of(inputs: Mapping[str, Array], b: int) -> dict[str, Any]:
    """Row b as the plain numbers that the oracle takes, cut to its valid proposals."""
    valid = int(inputs["valid"][b])
    return {
        "p_rows": inputs["p"][b].astype(np.float64).tolist(),
        "q_rows": inputs["q"][b, :valid].astype(np.float64).tolist(),
        "proposals": inputs["tokens"][b, 1 : valid + 1].tolist(),
        "accept_uniforms": inputs["accept_uniforms"][b].astype(np.float64).tolist(),
        "pair": tuple(inputs["draw_uniforms"][b].astype(np.float64).tolist()),
    }


def oracle_step(stage_name: str, row: Row) -> Step:
    """What the oracle decides."""
    arguments = {name: value for name, value in row.items() if name != "pair"}
    draw = partial(inverse_cdf, uniforms=row["pair"])
    if stage_name == "verify-points":
        arguments.pop("q_rows")
        return points_step(**arguments, draw=draw)
    step: Callable[..., Step] = {"verify-residual": residual_step, "verify-block": block_step}[stage_name]
    return step(**arguments, draw=draw)


def may_decide(stage_name: str, row: Row, found: Step) -> bool:
    """Whether float32 rounding may lead to this step."""
    return {
        "verify-residual": _may_by_residual,
        "verify-block": _may_by_block,
        "verify-points": _may_by_points,
    }[stage_name](row, *found)


def _may_accept(row: Row, q_at: Sequence[float], n: int) -> bool:
    """Whether the first n proposals may be accepted in turn, and the next one rejected."""
    tests = [
        (u * q, p[x]) for p, q, x, u in zip(row["p_rows"], q_at, row["proposals"], row["accept_uniforms"], strict=False)
    ]
    return all(a < b + error(b) for a, b in tests[:n]) and all(a >= b - error(b) for a, b in tests[n : n + 1])


def _may_by_residual(row: Row, n: int, token: int) -> bool:
    q_at = [q[x] for q, x in zip(row["q_rows"], row["proposals"], strict=True)]
    p = row["p_rows"][n]
    near_tokens = (
        near_draw(p, row["pair"]) if n == len(row["proposals"]) else near_correction(p, row["q_rows"][n], row["pair"])
    )
    return _may_accept(row, q_at, n) and token in near_tokens


def _may_by_points(row: Row, n: int, token: int) -> bool:
    p = list(row["p_rows"][n])
    if n < len(row["proposals"]):
        p[row["proposals"][n]] = 0.0
    return _may_accept(row, [1.0] * len(row["proposals"]), n) and token in near_draw(p, row["pair"])


def _may_by_block(row: Row, n: int, token: int) -> bool:
    p_rows, q_rows, proposals = row["p_rows"], row["q_rows"], row["proposals"]
    chances = block_acceptance(p_rows, q_rows, proposals)
    slack = 2e-4  # h divides two small numbers
    later = zip(row["accept_uniforms"][n:], chances[n:], strict=False)
    if n and row["accept_uniforms"][n - 1] >= chances[n - 1] + slack:
        return False
    if any(u < h - slack for u, h in later):
        return False
    if n == len(proposals):
        return token in near_draw(p_rows[n], row["pair"])
    mass = 1.0
    for p, q, x in zip(p_rows, q_rows, proposals[:n], strict=False):
        mass = min(1.0, mass * p[x] / q[x])
    weights = [max(mass * a - b, 0.0) for a, b in zip(p_rows[n], q_rows[n], strict=True)]
    errors = [4e-6 * mass * a + UNDERFLOW if a else 0.0 for a in p_rows[n]]
    return token in near(weights, errors, row["pair"])


def propose_and_verify(
    verify: onnxruntime.InferenceSession,
    target: Array,
    draft: Array,
    pending: Array,
    draft_length: int,
    rng: Random,
) -> tuple[Array, Array, Array]:
    """One round on tables of laws [V,V] by last token: proposals [B,K], accepted counts [B], next tokens [B]."""
    batch = len(pending)
    q = np.full((batch, draft_length, len(target)), np.nan, np.float32)
    tokens = np.concatenate([pending[:, None], np.full((batch, draft_length), -1)], axis=1)
    for step in range(draft_length):
        proposed = run_stage(
            "propose",
            p=draft[tokens[:, step : step + 1]],
            uniforms=uniforms(rng, batch, 2),
            coupled=np.zeros(batch),
            noise_keys=np.zeros((batch, 2)),
            positions=np.zeros((batch, 1)),
            step=np.full(batch, step),
            q_in=q,
            tokens_in=tokens,
        )
        q, tokens = proposed["q_out"], proposed["tokens_out"]
    feeds = {
        "p": target[tokens],
        "q": q,
        "tokens": tokens,
        "valid": rng.integers(0, draft_length + 1, batch),
        "accept_uniforms": uniforms(rng, batch, draft_length),
        "draw_uniforms": uniforms(rng, batch, 2),
    }
    outputs = run_session(verify, feeds)
    return tokens[:, 1:], outputs["accepted"], outputs["next_token"]
