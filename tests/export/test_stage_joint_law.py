"""Draft draws, verification and corrections through the stages emit the target's joint law.

Many chains decode at once, each a row of the batch: both models are tables of laws by the last token, so that the
law of three tokens, across the boundaries of rounds, can be enumerated and compared with counts.
"""

from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from onnxscript import FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun.oracle import Table, Tokens, plain_law
from forerun_export.sampling.building_blocks import K_PLUS_1, B, K, V, formula, inverse_cdf, row_at
from forerun_export.sampling.saving import sampling_model
from forerun_export.sampling.verification import verify_block, verify_points
from helpers.joint_law import p_value
from helpers.sampling import Array, Random, session_of
from helpers.stages import propose_and_verify, random_laws

POSITIONS = 3
CHAINS = 40_000
BATCH = 10_000


@formula
def block_drawing_from_target(
    p: FLOAT[B, K_PLUS_1, V],
    q: FLOAT[B, K, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """verify_block, but what follows the accepted tokens is drawn from p itself."""
    accepted, _ = verify_block(p, q, tokens, valid, accept_uniforms, draw_uniforms)
    next_token = op.Squeeze(inverse_cdf(row_at(p, accepted), draw_uniforms), [1])
    return accepted, next_token


@formula
def points_drawing_from_target(
    p: FLOAT[B, K_PLUS_1, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """verify_points, but what follows the accepted tokens may be the proposal that was rejected."""
    accepted, _ = verify_points(p, tokens, valid, accept_uniforms, draw_uniforms)
    next_token = op.Squeeze(inverse_cdf(row_at(p, accepted), draw_uniforms), [1])
    return accepted, next_token


GRAPHS: dict[str, Any] = {
    "block": verify_block,
    "block, drawing from p": block_drawing_from_target,
    "points": verify_points,
    "points, drawing from p": points_drawing_from_target,
}
RIGHT, WRONG = ["block", "points"], ["block, drawing from p", "points, drawing from p"]


class Case(NamedTuple):
    """What is decoded: tables of V x V laws, and up to K proposals a round."""

    seed: int
    vocabulary_size: int
    draft_length: int


CASES = [Case(1, 8, 2), Case(2, 6, 4)]


@cache
def tables(case: Case) -> tuple[Array, Array]:
    """Target and draft: the laws after each last token, with tokens that either rules out."""
    rng = np.random.default_rng(case.seed)
    target = random_laws(rng, case.vocabulary_size, case.vocabulary_size)
    mixed = target * rng.uniform(0.2, 1.8, target.shape) + random_laws(rng, *target.shape)
    return target, (mixed / mixed.sum(-1, keepdims=True)).astype(np.float32)


def decode(name: str, case: Case, rng: Random) -> Counter[Tokens]:
    """The first POSITIONS tokens of BATCH chains that start after token 0, in as many rounds as each takes."""
    target, draft = tables(case)
    verify = session_of(sampling_model(GRAPHS[name], case.vocabulary_size))
    if name.startswith("points"):  # the likeliest successor, not drawn
        draft = np.eye(case.vocabulary_size, dtype=np.float32)[draft.argmax(-1)]
    emitted: list[list[int]] = [[0] for _ in range(BATCH)]
    while unfinished := [chain for chain in emitted if len(chain) <= POSITIONS]:
        pending = np.array([chain[-1] for chain in unfinished])
        outputs = propose_and_verify(verify, target, draft, pending, case.draft_length, rng)
        for chain, proposals, n, token in zip(unfinished, *(part.tolist() for part in outputs), strict=True):
            chain += [*proposals[:n], token]
    return Counter(tuple(chain[1 : POSITIONS + 1]) for chain in emitted)


def fit(name: str, case: Case) -> float:
    """The p-value of CHAINS chains under the target's law."""
    rng = np.random.default_rng(case.seed)
    observed = sum((decode(name, case, rng) for _ in range(CHAINS // BATCH)), Counter[Tokens]())
    laws = tables(case)[0].astype(np.float64)
    laws /= laws.sum(-1, keepdims=True)
    table: Table = lambda context: laws[context[-1]].tolist()  # noqa: E731
    expected = plain_law(table, positions=POSITIONS, context=(0,))
    if name in RIGHT:
        assert observed.keys() <= expected.keys(), "a token that the target rules out was emitted"
    return p_value(observed, expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RIGHT)
def test_the_stages_emit_the_joint_law_of_the_target(name: str, case: Case) -> None:
    assert fit(name, case) > 1e-3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", WRONG)
def test_a_sample_of_this_size_exposes_drawing_from_the_target(name: str, case: Case) -> None:
    assert fit(name, case) < 1e-12
