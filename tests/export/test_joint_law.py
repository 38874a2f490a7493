"""The whole path of graphs, draft draw to correction, emits tokens with the target's joint law.

Many chains decode at once, each a row of the batch: both models are tables of logits by the last token, so that
the law of three tokens, across the boundaries of rounds, can be enumerated and compared with counts.
"""

import math
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
from onnxscript import FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun.oracle import (
    Table,
    Tokens,
    draw_from_target_rule,
    joint_law,
    law_of,
    plain_law,
)
from forerun_export.sampling import sampling_model
from forerun_export.sampling.building_blocks import K_PLUS_1, B, K, V, formula, inverse_cdf, law, row_at
from forerun_export.sampling.graphs import verify_residual
from helpers.sampling import Array, Random, run, session, session_of, uniforms

POSITIONS = 3
TEMPERATURE = 0.7
CHAINS = 40_000
BATCH = 2_000


@formula
def verify_drawing_from_target(
    logits: FLOAT[B, K_PLUS_1, V],
    q: FLOAT[B, K, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    temperature: FLOAT[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """verify_residual, but what follows a rejection is drawn from p itself."""
    accepted, _ = verify_residual(logits, q, tokens, valid, temperature, accept_uniforms, draw_uniforms)
    p_n = row_at(law(logits, temperature), accepted)
    next_token = op.Squeeze(inverse_cdf(p_n, draw_uniforms), [1])
    return accepted, next_token


class Case(NamedTuple):
    """What is decoded: tables of V x V logits, and up to K proposals a round."""

    seed: int
    vocabulary_size: int
    draft_length: int


CASES = [Case(1, 8, 2), Case(2, 12, 3)]


class Pair(NamedTuple):
    """Target and draft as tables [V,V]: the logits after each last token."""

    target: Array
    draft: Array


def make_pair(case: Case) -> Pair:
    """A draft that resembles its target, which rules out one token in ten."""
    rng = np.random.default_rng(case.seed)
    target = rng.standard_normal((case.vocabulary_size, case.vocabulary_size))
    draft = target + rng.standard_normal(target.shape)
    target[rng.random(target.shape) < 0.1] = -np.inf
    return Pair(target.astype(np.float32), draft.astype(np.float32))


def table(logits: Array) -> Table:
    laws = [law_of(row, TEMPERATURE) for row in logits.astype(np.float64).tolist()]
    return lambda context: laws[context[-1]]


def decode(pair: Pair, verify: onnxruntime.InferenceSession, draft_length: int, rng: Random) -> list[Tokens]:
    """The first POSITIONS tokens of BATCH chains that start after token 0, in as many rounds as each takes."""
    emitted: list[list[int]] = [[0] for _ in range(BATCH)]
    while unfinished := [chain for chain in emitted if len(chain) <= POSITIONS]:
        pending = np.array([chain[-1] for chain in unfinished])
        outputs = one_round(pair, verify, draft_length, rng, pending)
        for chain, proposals, n, token in zip(unfinished, *(part.tolist() for part in outputs), strict=True):
            chain += [*proposals[:n], token]
    return [tuple(chain[1 : POSITIONS + 1]) for chain in emitted]


def one_round(
    pair: Pair, verify: onnxruntime.InferenceSession, draft_length: int, rng: Random, pending: Array
) -> tuple[Array, Array, Array]:
    """Proposals [B,K], accepted counts [B] and next tokens [B] of one round; rows have 0..K proposals that count."""
    batch, temperature = len(pending), np.full(len(pending), TEMPERATURE)
    q = np.full((batch, draft_length, len(pair.target)), np.nan, np.float32)
    tokens = np.concatenate([pending[:, None], np.full((batch, draft_length), -1)], axis=1)
    for step in range(draft_length):
        proposed = run(
            session("propose", len(pair.target)),
            logits=pair.draft[tokens[:, step : step + 1]],
            temperature=temperature,
            uniforms=uniforms(rng, batch, 2),
            step=np.full(batch, step),
            q_in=q,
            tokens_in=tokens,
        )
        q, tokens = proposed["q_out"], proposed["tokens_out"]
    outputs = run(
        verify,
        logits=pair.target[tokens],
        q=q,
        tokens=tokens,
        valid=rng.integers(0, draft_length + 1, batch),
        temperature=temperature,
        accept_uniforms=uniforms(rng, batch, draft_length),
        draw_uniforms=uniforms(rng, batch, 2),
    )
    return tokens[:, 1:], outputs["accepted"], outputs["next_token"]


@cache
def counts(case: Case, drawing_from_target: bool) -> Counter[Tokens]:
    """How often each sequence of POSITIONS tokens came out of CHAINS."""
    graph: Any = verify_drawing_from_target if drawing_from_target else verify_residual
    pair, rng = make_pair(case), np.random.default_rng(case.seed)
    verify = session_of(sampling_model(graph, case.vocabulary_size))
    return Counter(
        tokens for _ in range(CHAINS // BATCH) for tokens in decode(pair, verify, case.draft_length, rng)
    )


def p_value(observed: Counter[Tokens], expected: dict[Tokens, float]) -> float:
    """Of the G-test: the chance of a fit as bad as this if the law is `expected`; rare sequences share a cell."""
    total = sum(observed.values())
    cells = [(observed[key], total * p) for key, p in expected.items() if total * p >= 5]
    rest = (total - sum(o for o, _ in cells), total - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    g = 2 * sum(o * math.log(o / e) for o, e in cells if o)
    return chi_square_tail(g, len(cells) - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Wilson and Hilferty 1931: the cube root of chi-square over its degrees of freedom is nearly normal."""
    spread = 2 / (9 * degrees)
    z = ((max(statistic, 0.0) / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


def exact_laws(case: Case) -> tuple[dict[Tokens, float], dict[Tokens, float]]:
    """Of POSITIONS tokens: the target's, and that of the rule which draws from p after a rejection (K = 1)."""
    target, draft = (table(logits) for logits in make_pair(case))
    biased = joint_law(
        target, draft, draw_from_target_rule, draft_length=1, positions=POSITIONS, context=(0,)
    )
    return plain_law(target, positions=POSITIONS, context=(0,)), biased


@pytest.mark.parametrize("case", CASES)
def test_the_graphs_emit_the_joint_law_of_the_target(case: Case) -> None:
    expected, _ = exact_laws(case)
    observed = counts(case, drawing_from_target=False)
    assert observed.total() == CHAINS
    assert observed.keys() <= expected.keys(), "a token that the target rules out was emitted"
    assert p_value(observed, expected) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_a_sample_of_this_size_exposes_drawing_from_the_target_after_a_rejection(case: Case) -> None:
    expected, _ = exact_laws(case)
    assert p_value(counts(case, drawing_from_target=True), expected) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_the_power_of_the_sample_is_no_accident_of_the_seed(case: Case) -> None:
    """G grows by 2 N KL(biased, target) under the wrong rule: far beyond what the test of the right one allows."""
    expected, biased = exact_laws(case)
    excess = 2 * CHAINS * sum(p * math.log(p / expected[tokens]) for tokens, p in biased.items())
    degrees = len(expected) - 1
    assert chi_square_tail(degrees + excess / 2, degrees) < 1e-12


def test_the_tail_of_chi_square_is_that_of_the_tables() -> None:
    assert chi_square_tail(124.342, 100) == pytest.approx(0.05, rel=0.02)
    assert chi_square_tail(149.449, 100) == pytest.approx(0.001, rel=0.05)
