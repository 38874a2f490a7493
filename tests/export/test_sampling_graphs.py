"""The sampling graphs decide what the oracle decides: same inputs, same uniforms, same tokens."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import onnxruntime
import pytest

from forerun.oracle import BLOCK_LENGTH, argmax, greedy_step, inverse_cdf, residual_step
from helpers.sampling import (
    LARGEST_UNIFORM,
    Array,
    Random,
    laws,
    near_draw,
    near_residual_step,
    run,
    session,
    uniforms,
)
from helpers.sampling_cases import TEMPERATURES, greedy_verification, make_logits, verification

ROUNDED_CASES = 1 / 1000  # how many decisions may lie within float32 rounding of their boundary

# Vocabulary size -> calls of the graph: one token to several blocks, with and without padding.
CALLS = {1: 20, 2: 300, 7: 400, 64: 400, 256: 40, 300: 40, 49152: 2}


def row_of(inputs: dict[str, Array], b: int) -> dict[str, Any]:
    """Row b as the plain numbers that the oracle takes, cut to its valid proposals."""
    valid = int(inputs["valid"][b])
    return {
        "p_rows": laws(inputs["logits"][b], float(inputs["temperature"][b])),
        "q_rows": inputs["q"][b, :valid].astype(np.float64).tolist(),
        "proposals": inputs["tokens"][b, 1 : valid + 1].tolist(),
        "accept_uniforms": inputs["accept_uniforms"][b].astype(np.float64).tolist(),
        "pair": tuple(inputs["draw_uniforms"][b].astype(np.float64).tolist()),
    }


def expected_step(row: dict[str, Any]) -> tuple[int, int]:
    arguments = {name: value for name, value in row.items() if name != "pair"}
    return residual_step(**arguments, draw=partial(inverse_cdf, uniforms=row["pair"]))


def random_calls(vocabulary_size: int) -> Iterator[tuple[Random, int, int]]:
    rng = np.random.default_rng(vocabulary_size)
    for _ in range(CALLS[vocabulary_size]):
        yield rng, int(rng.integers(1, 5)), int(rng.integers(1, 6))


@pytest.mark.parametrize("vocabulary_size", CALLS)
def test_draw_takes_the_token_that_the_oracle_takes(vocabulary_size: int) -> None:
    cases = rounded = 0
    for rng, batch, _ in random_calls(vocabulary_size):
        logits, pairs = make_logits(rng, batch, 1, vocabulary_size), uniforms(rng, batch, 2, extremes=0.05)
        temperature = rng.choice(TEMPERATURES, batch)
        drawn = run(session("draw", vocabulary_size), logits=logits, temperature=temperature, uniforms=pairs)[
            "token"
        ]
        assert drawn.shape == (batch, 1)
        for b in range(batch):
            p, pair, token = laws(logits[b], temperature[b])[0], pairs[b].tolist(), int(drawn[b, 0])
            cases += 1
            if token != inverse_cdf(p, pair):
                rounded += 1
                assert token in near_draw(p, pair), f"T={temperature[b]}, u={pair}"
    assert rounded <= max(1, cases * ROUNDED_CASES)


@pytest.mark.parametrize("vocabulary_size", CALLS)
def test_verify_residual_decides_as_the_oracle_does(vocabulary_size: int) -> None:
    cases = rounded = 0
    for rng, batch, draft_length in random_calls(vocabulary_size):
        inputs = verification(rng, batch, draft_length, vocabulary_size)
        outputs = run(session("verify-residual", vocabulary_size), **inputs)
        for b in range(batch):
            row, found = row_of(inputs, b), (int(outputs["accepted"][b]), int(outputs["next_token"][b]))
            cases += 1
            if found != expected_step(row):
                rounded += 1
                assert near_residual_step(**row)(*found), f"{found}, not {expected_step(row)}"
    assert rounded <= max(1, cases * ROUNDED_CASES)


@pytest.mark.parametrize("vocabulary_size", CALLS)
def test_greedy_graphs_decide_as_the_oracle_does(vocabulary_size: int) -> None:
    for rng, batch, draft_length in random_calls(vocabulary_size):
        inputs = greedy_verification(rng, batch, draft_length, vocabulary_size)
        rows = inputs["logits"].tolist()
        drawn = run(session("draw-greedy", vocabulary_size), logits=inputs["logits"][:, :1])["token"]
        assert drawn.tolist() == [[argmax(row[0])] for row in rows]
        outputs = run(session("verify-greedy", vocabulary_size), **inputs)
        for b, valid in enumerate(inputs["valid"]):
            expected = greedy_step(rows[b], inputs["tokens"][b, 1 : valid + 1].tolist())
            assert (outputs["accepted"][b], outputs["next_token"][b]) == expected


@pytest.mark.parametrize("vocabulary_size", [2, 64, 300])
def test_verify_residual_at_temperature_zero_is_verify_greedy(vocabulary_size: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        inputs = greedy_verification(rng, 4, 3, vocabulary_size)
        sampling = {
            "q": np.eye(vocabulary_size)[inputs["tokens"][:, 1:]],  # what propose writes at temperature 0
            "temperature": np.zeros(4),
            "accept_uniforms": uniforms(rng, 4, 3, extremes=0.3),
            "draw_uniforms": uniforms(rng, 4, 2, extremes=0.3),
        }
        residual = run(session("verify-residual", vocabulary_size), **inputs, **sampling)
        greedy = run(session("verify-greedy", vocabulary_size), **inputs)
        assert residual["accepted"].tolist() == greedy["accepted"].tolist()
        assert residual["next_token"].tolist() == greedy["next_token"].tolist()


@pytest.mark.parametrize("vocabulary_size", [7, 300])
def test_propose_keeps_the_law_that_the_token_was_drawn_from(vocabulary_size: int) -> None:
    rng = np.random.default_rng(1)
    for temperature in TEMPERATURES:
        logits, pairs = make_logits(rng, 3, 1, vocabulary_size), uniforms(rng, 3, 2)
        outputs = run(
            session("propose", vocabulary_size),
            logits=logits,
            temperature=np.full(3, temperature),
            uniforms=pairs,
            step=np.full(3, 1),
            q_in=np.full((3, 4, vocabulary_size), 5.0),
            tokens_in=np.full((3, 5), 6),
        )
        expected = [laws(row, temperature)[0] for row in logits]
        np.testing.assert_allclose(outputs["q_out"][:, 1], expected, rtol=2e-5, atol=1e-37)
        assert outputs["token"][:, 0].tolist() == [
            inverse_cdf(row, pair)
            for row, pair in zip(outputs["q_out"][:, 1].tolist(), pairs.tolist(), strict=True)
        ]
        assert (outputs["q_out"][:, [0, 2, 3]] == 5.0).all()
        assert outputs["tokens_out"][:, 2].tolist() == outputs["token"][:, 0].tolist()
        assert (outputs["tokens_out"][:, [0, 1, 3, 4]] == 6).all()


def test_propose_writes_into_the_buffers_that_it_is_given() -> None:
    """Bound to the same memory, inputs and outputs are one: no copy of [B,K,V] between draft steps."""
    graph, vocabulary_size, rng = session("propose", 300), 300, np.random.default_rng(2)
    q, tokens = np.zeros((2, 3, vocabulary_size), np.float32), np.zeros((2, 4), np.int64)
    held = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(value)
        for name, value in (("q", q), ("tokens", tokens))
    }
    for step in range(3):
        binding = graph.io_binding()
        binding.bind_output("token")
        binding.bind_cpu_input("logits", make_logits(rng, 2, 1, vocabulary_size))
        binding.bind_cpu_input("temperature", np.ones(2, np.float32))
        binding.bind_cpu_input("uniforms", uniforms(rng, 2, 2))
        binding.bind_cpu_input("step", np.full(2, step))
        for name, value in held.items():
            binding.bind_ortvalue_input(f"{name}_in", value)
            binding.bind_ortvalue_output(f"{name}_out", value)
        graph.run_with_iobinding(binding)
        drawn = binding.get_outputs()[0].numpy()
        assert held["tokens"].numpy()[:, step + 1].tolist() == drawn[:, 0].tolist()
    np.testing.assert_allclose(held["q"].numpy().sum(-1), 1, rtol=1e-5)


def test_propose_greedy_writes_the_argmax_behind_the_pending_token() -> None:
    logits = np.array([[[0.0, 1.0, 1.0]], [[2.0, 1.0, 0.0]]])
    outputs = run(
        session("propose-greedy", 3), logits=logits, step=np.full(2, 1), tokens_in=np.full((2, 4), 9)
    )
    assert outputs["token"].tolist() == [[1], [0]]
    assert outputs["tokens_out"].tolist() == [[9, 9, 1, 9], [9, 9, 0, 9]]


@pytest.mark.parametrize("vocabulary_size", [7, 300])
def test_a_row_is_the_same_alone_and_beside_garbage(vocabulary_size: int) -> None:
    rng = np.random.default_rng(3)
    graph = session("verify-residual", vocabulary_size)
    for garbage in (np.nan, np.inf, -np.inf, 3e38):
        for _ in range(20):
            inputs = verification(rng, 3, 3, vocabulary_size)
            alone = run(graph, **{name: value[1:2] for name, value in inputs.items()})
            inputs["logits"][[0, 2]] = garbage
            inputs["q"][[0, 2]] = garbage
            together = run(graph, **inputs)
            assert {name: value[1:2].tolist() for name, value in together.items()} == {
                name: value.tolist() for name, value in alone.items()
            }


@pytest.mark.parametrize("vocabulary_size", [7, 300])
def test_q_is_bit_identical_alone_and_beside_garbage(vocabulary_size: int) -> None:
    rng = np.random.default_rng(4)
    inputs = {
        "logits": make_logits(rng, 3, 1, vocabulary_size),
        "temperature": np.array([0.0, 0.7, 1.0]),
        "uniforms": uniforms(rng, 3, 2),
        "step": np.full(3, 1),
        "q_in": np.zeros((3, 2, vocabulary_size)),
        "tokens_in": np.zeros((3, 3)),
    }
    alone = run(session("propose", vocabulary_size), **{name: value[1:2] for name, value in inputs.items()})
    inputs["logits"][[0, 2]] = np.nan
    together = run(session("propose", vocabulary_size), **inputs)
    for name, value in alone.items():
        assert value.tobytes() == together[name][1:2].tobytes()


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("vocabulary_size", [7, 300])
def test_a_row_without_a_law_still_gives_a_token_of_the_vocabulary(vocabulary_size: int, fill: float) -> None:
    """Logits of NaN have no law; the graph must not read or name what lies outside the vocabulary."""
    rng = np.random.default_rng(5)
    inputs = verification(rng, 2, 3, vocabulary_size)
    for part in (slice(None), slice(3, None), slice(vocabulary_size - 1, None)):
        inputs["logits"][..., part] = fill
        outputs = run(session("verify-residual", vocabulary_size), **inputs)
        assert ((outputs["next_token"] >= 0) & (outputs["next_token"] < vocabulary_size)).all()
        assert ((outputs["accepted"] >= 0) & (outputs["accepted"] <= inputs["valid"])).all()


@pytest.mark.parametrize("first", [0.0, LARGEST_UNIFORM])
@pytest.mark.parametrize("second", [0.0, LARGEST_UNIFORM])
@pytest.mark.parametrize("vocabulary_size", [2, 7, 256, 300, 1000])
def test_a_token_of_probability_zero_is_never_drawn(
    vocabulary_size: int, first: float, second: float
) -> None:
    rng = np.random.default_rng(6)
    pair = np.array([[first, second]])
    for allowed_count in (1, 2, 5):
        allowed = rng.permutation(vocabulary_size)[:allowed_count]
        logits = np.full((1, 1, vocabulary_size), -np.inf)
        # Down to logits whose probabilities are subnormal numbers.
        logits[..., allowed] = rng.choice([0.0, -1.0, -90.0, -100.0], len(allowed))
        token = run(session("draw", vocabulary_size), logits=logits, temperature=np.ones(1), uniforms=pair)[
            "token"
        ]
        assert token[0, 0] in allowed


@pytest.mark.parametrize("uniform", [0.0, LARGEST_UNIFORM])
def test_a_proposal_of_probability_zero_is_never_accepted(uniform: float) -> None:
    logits = np.where(np.arange(5) == 2, -np.inf, np.zeros((1, 2, 5)))
    outputs = run(
        session("verify-residual", 5),
        logits=logits,
        q=np.eye(5)[[[2]]],
        tokens=np.array([[0, 2]]),
        valid=np.ones(1),
        temperature=np.ones(1),
        accept_uniforms=np.full((1, 1), uniform),
        draw_uniforms=np.full((1, 2), uniform),
    )
    assert outputs["accepted"].tolist() == [0]
    assert outputs["next_token"][0] != 2


def test_a_rejection_that_leaves_no_residual_draws_from_the_target() -> None:
    """q a hair above p everywhere, as rounding can make it: p(x) <= u q(x), yet ReLU(p - q) is 0."""
    outputs = run(
        session("verify-residual", 4),
        logits=np.zeros((1, 2, 4)),
        q=np.full((1, 1, 4), 0.26),
        tokens=np.array([[0, 1]]),
        valid=np.ones(1),
        temperature=np.ones(1),
        accept_uniforms=np.full((1, 1), LARGEST_UNIFORM),
        draw_uniforms=np.array([[0.0, 0.8]]),
    )
    assert outputs["accepted"].tolist() == [0]
    assert outputs["next_token"].tolist() == [3]


def realised_law(weights: Array, *, block_length: int) -> Array:
    """The exact law of float32 inverse-CDF draws from one row: counts of the uniforms that lead to each token."""
    blocks = np.pad(weights, (0, -len(weights) % block_length)).reshape(-1, block_length)
    shares = np.array([_realised_shares(block) for block in blocks])
    of_block = _realised_shares(blocks.sum(-1, dtype=np.float32))
    joint: Array = of_block[:, None] * shares
    return joint.reshape(-1)[: len(weights)]


def _realised_shares(weights: Array) -> Array:
    prefix = np.cumsum(weights, dtype=np.float32)
    cdf = prefix / prefix[-1]
    counts: Array = np.diff(np.ceil(cdf.astype(np.float64) * 2**23), prepend=0)
    return counts / 2**23


def test_two_uniforms_realise_a_long_tailed_law_where_one_does_not() -> None:
    """Exact, not sampled: 49152 tokens whose probabilities fall off as those of a language model do."""
    vocabulary_size = 49152
    rank = np.random.default_rng(7).permutation(vocabulary_size) + 1.0
    weights = (rank**-1.3).astype(np.float32)
    law = weights.astype(np.float64) / weights.sum(dtype=np.float64)

    def distance(block_length: int) -> float:
        return float(np.abs(realised_law(weights, block_length=block_length) - law).sum() / 2)

    assert distance(BLOCK_LENGTH) < 1e-5
    assert distance(vocabulary_size) > 50 * distance(BLOCK_LENGTH)
