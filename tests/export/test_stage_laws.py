"""The stages that draw and verify decide what the oracle decides: same laws, same uniforms, same tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from forerun.oracle import argmax, greedy_step, inverse_cdf
from helpers.sampling import LARGEST_UNIFORM, Array, Random, near_draw, uniforms
from helpers.sampling_cases import greedy_verification, make_logits
from helpers.stages import (
    law_verification,
    may_decide,
    noise_keys,
    oracle_step,
    random_laws,
    row_of,
    run_stage,
)

ROUNDED_CASES = 1 / 1000  # how many decisions may lie within float32 rounding of their boundary

# Vocabulary size -> calls of the graph: one token to several blocks, with and without filling.
CALLS = {1: 10, 2: 150, 7: 150, 64: 100, 256: 20, 300: 30, 49152: 1}
SAMPLING = ["verify-residual", "verify-block", "verify-points"]
VERIFYING = [*SAMPLING, "verify-coupled"]
LAWS: dict[str, dict[str, list[Any]]] = {
    "law": {},
    "law-filtered": {"top_k": [5] * 2, "top_p": [0.9] * 2, "min_p": [0.1] * 2},
}
BAD_LOGITS = [np.nan, np.inf, -np.inf]


def random_calls(vocabulary_size: int) -> Iterator[tuple[Random, int, int]]:
    rng = np.random.default_rng(vocabulary_size)
    for _ in range(CALLS[vocabulary_size]):
        yield rng, int(rng.integers(1, 5)), int(rng.integers(1, 6))


def plain_draw(p: Array, pairs: Array) -> Array:
    batch = len(p)
    return run_stage(
        "draw",
        p=p,
        uniforms=pairs,
        coupled=np.zeros(batch),
        noise_keys=np.zeros((batch, 2)),
        positions=np.zeros((batch, 1)),
    )["token"][:, 0]


@pytest.mark.parametrize("vocabulary_size", CALLS)
def test_draw_takes_the_token_that_the_oracle_takes(vocabulary_size: int) -> None:
    cases = rounded = 0
    for rng, batch, _ in random_calls(vocabulary_size):
        p, pairs = random_laws(rng, batch, 1, vocabulary_size), uniforms(rng, batch, 2, extremes=0.05)
        for row, pair, token in zip(p[:, 0].tolist(), pairs.tolist(), plain_draw(p, pairs), strict=True):
            cases += 1
            if token != inverse_cdf(row, pair):
                rounded += 1
                assert int(token) in near_draw(row, pair)
    assert rounded <= max(1, cases * ROUNDED_CASES)


@pytest.mark.parametrize("vocabulary_size", CALLS)
@pytest.mark.parametrize("name", SAMPLING)
def test_verification_decides_as_the_oracle_does(name: str, vocabulary_size: int) -> None:
    cases = rounded = 0
    for rng, batch, draft_length in random_calls(vocabulary_size):
        inputs = law_verification(rng, batch, draft_length, vocabulary_size)
        outputs = run_stage(name, **inputs)
        for b in range(batch):
            row, found = row_of(inputs, b), (int(outputs["accepted"][b]), int(outputs["next_token"][b]))
            cases += 1
            if found != oracle_step(name, row):
                rounded += 1
                assert may_decide(name, row, found), f"{found}, not {oracle_step(name, row)}"
    assert rounded <= max(1, cases * ROUNDED_CASES)


@pytest.mark.parametrize("vocabulary_size", CALLS)
def test_greedy_stages_decide_as_the_oracle_does(vocabulary_size: int) -> None:
    for rng, batch, draft_length in random_calls(vocabulary_size):
        inputs = greedy_verification(rng, batch, draft_length, vocabulary_size)
        rows = inputs["logits"].tolist()
        drawn = run_stage("draw-greedy", logits=inputs["logits"][:, :1])["token"]
        assert drawn.tolist() == [[argmax(row[0])] for row in rows]
        outputs = run_stage("verify-greedy", **inputs)
        for b, valid in enumerate(inputs["valid"]):
            expected = greedy_step(rows[b], inputs["tokens"][b, 1 : valid + 1].tolist())
            assert (outputs["accepted"][b], outputs["next_token"][b]) == expected


@pytest.mark.parametrize("name", VERIFYING)
@pytest.mark.parametrize("vocabulary_size", [2, 64, 300])
def test_every_law_at_temperature_zero_is_greedy(name: str, vocabulary_size: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        inputs = greedy_verification(rng, 4, 3, vocabulary_size)
        sampling = {
            "p": run_stage("law", logits=inputs["logits"], temperature=np.zeros(4))["p"],
            "q": np.eye(vocabulary_size)[inputs["tokens"][:, 1:]],  # what propose writes at temperature 0
            "accept_uniforms": uniforms(rng, 4, 3, extremes=0.3),
            "draw_uniforms": uniforms(rng, 4, 2, extremes=0.3),
            "noise_keys": noise_keys(rng, 4),
            "positions": rng.integers(0, 1000, (4, 4)),
        }
        found, greedy = run_stage(name, **inputs, **sampling), run_stage("verify-greedy", **inputs)
        assert found["accepted"].tolist() == greedy["accepted"].tolist()
        assert found["next_token"].tolist() == greedy["next_token"].tolist()


@pytest.mark.parametrize("name", VERIFYING)
@pytest.mark.parametrize("vocabulary_size", [5, 1000])
def test_rows_decide_the_same_alone_and_beside_others(name: str, vocabulary_size: int) -> None:
    """Whatever the neighbours, the batch and K: invalid proposals behind a row's own change nothing."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        inputs = law_verification(rng, 3, 4, vocabulary_size)
        inputs["valid"] = np.minimum(inputs["valid"], 2)
        alone = run_stage(name, **{key: value[1:2] for key, value in inputs.items()})
        fewer = {
            **inputs,
            "p": inputs["p"][:, :3],
            "q": inputs["q"][:, :2],
            "tokens": inputs["tokens"][:, :3],
        }
        fewer |= {
            "accept_uniforms": inputs["accept_uniforms"][:, :2],
            "positions": inputs["positions"][:, :3],
        }
        shorter = run_stage(name, **{key: value[1:2] for key, value in fewer.items()})
        inputs["p"][[0, 2]] = np.nan
        together = run_stage(name, **inputs)
        for output, value in alone.items():
            assert value[0] == together[output][1] == shorter[output][0]


@pytest.mark.parametrize("vocabulary_size", [7, 300])
def test_propose_keeps_the_law_that_the_token_was_drawn_from(vocabulary_size: int) -> None:
    rng = np.random.default_rng(2)
    p, pairs, keys = random_laws(rng, 4, 1, vocabulary_size), uniforms(rng, 4, 2), noise_keys(rng, 4)
    feeds = {
        "p": p,
        "uniforms": pairs,
        "coupled": [False, True, False, True],
        "noise_keys": keys,
        "positions": np.full((4, 1), 9),
    }
    outputs = run_stage(
        "propose",
        **feeds,
        step=np.full(4, 1),
        q_in=np.full((4, 3, vocabulary_size), 5.0),
        tokens_in=np.full((4, 4), 6),
    )
    assert outputs["q_out"][:, 1].tobytes() == p.tobytes()
    assert (outputs["q_out"][:, [0, 2]] == 5.0).all()
    assert outputs["token"].tolist() == run_stage("draw", **feeds)["token"].tolist()
    assert outputs["tokens_out"][:, 2].tolist() == outputs["token"][:, 0].tolist()
    assert (outputs["tokens_out"][:, [0, 1, 3]] == 6).all()


def test_propose_greedy_writes_the_argmax_behind_the_pending_token() -> None:
    logits = np.array([[[0.0, 1.0, 1.0]], [[2.0, 1.0, 0.0]]])
    outputs = run_stage("propose-greedy", logits=logits, step=np.full(2, 1), tokens_in=np.full((2, 4), 9))
    assert outputs["token"].tolist() == [[1], [0]]
    assert outputs["tokens_out"].tolist() == [[9, 9, 1, 9], [9, 9, 0, 9]]


@pytest.mark.parametrize("uniform", [0.0, LARGEST_UNIFORM])
@pytest.mark.parametrize("name", SAMPLING)
def test_a_proposal_of_probability_zero_is_never_accepted(name: str, uniform: float) -> None:
    p = np.where(np.arange(5) == 2, 0.0, np.full((1, 3, 5), 0.25))
    outputs = run_stage(
        name,
        p=p,
        q=np.eye(5)[[[2, 1]]],
        tokens=np.array([[0, 2, 1]]),
        valid=np.full(1, 2),
        accept_uniforms=np.full((1, 2), uniform),
        draw_uniforms=np.full((1, 2), uniform),
    )
    assert outputs["accepted"].tolist() == [0]
    assert outputs["next_token"][0] != 2


@pytest.mark.parametrize("first", [0.0, LARGEST_UNIFORM])
@pytest.mark.parametrize("second", [0.0, LARGEST_UNIFORM])
@pytest.mark.parametrize("vocabulary_size", [2, 300, 1000])
def test_a_token_of_probability_zero_is_never_drawn(vocabulary_size: int, first: float, second: float) -> None:
    rng = np.random.default_rng(3)
    for allowed_count in (1, 2, 5):
        allowed = rng.permutation(vocabulary_size)[:allowed_count]
        p = np.zeros((1, 1, vocabulary_size), np.float32)
        p[..., allowed] = rng.choice([1.0, 0.3, 1e-38, 1e-44], len(allowed))  # down to subnormal numbers
        assert plain_draw(p, np.array([[first, second]]))[0] in allowed


def test_identical_laws_are_always_accepted_whole() -> None:
    rng = np.random.default_rng(4)
    p = random_laws(rng, 64, 4, 50)
    tokens = np.concatenate([np.zeros((64, 1)), p[:, :-1].argmax(-1)], axis=1)
    for name in ("verify-residual", "verify-block"):
        outputs = run_stage(
            name,
            p=p,
            q=p[:, :-1],
            tokens=tokens,
            valid=np.full(64, 3),
            accept_uniforms=np.full((64, 3), LARGEST_UNIFORM),
            draw_uniforms=uniforms(rng, 64, 2),
        )
        assert outputs["accepted"].tolist() == [3] * 64


# What has no law.


@pytest.mark.parametrize("bad", BAD_LOGITS)
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize("vocabulary_size", [1, 7, 300, 49152])
def test_a_row_without_a_law_draws_no_token(vocabulary_size: int, temperature: float, bad: float) -> None:
    rng = np.random.default_rng(5)
    good = make_logits(rng, 1, 1, vocabulary_size)
    places: list[Any] = [slice(None)] if bad == -np.inf else [0, vocabulary_size // 2, vocabulary_size - 1, slice(None)]
    for place in places:
        logits = np.concatenate([good, good])
        logits[0, :, place] = bad
        for name, filters in LAWS.items():
            p = run_stage(name, logits=logits, temperature=np.full(2, temperature), **filters)["p"]
            alone = run_stage(
                name,
                logits=good,
                temperature=np.full(1, temperature),
                **{key: value[:1] for key, value in filters.items()},
            )["p"]
            assert alone.tobytes() == p[1:].tobytes()
            drawn = plain_draw(p, uniforms(rng, 2, 2))
            assert drawn[0] == -1
            assert drawn[1] >= 0
        greedy = run_stage("draw-greedy", logits=logits)["token"][:, 0]
        assert greedy[0] == -1
        assert greedy[1] == argmax(good[0, 0].tolist())


@pytest.mark.parametrize("name", [*VERIFYING, "verify-greedy"])
def test_only_emission_from_a_row_without_a_law_is_a_fault(name: str) -> None:
    """Rows 0..n decide; a fault behind the emitted token, or behind `valid`, is nobody's business."""
    rng = np.random.default_rng(6)
    seen = {"fault": 0, "fine": 0}
    for _ in range(200):
        inputs = law_verification(rng, 3, 4, 7)
        if name == "verify-greedy":
            inputs |= greedy_verification(rng, 3, 4, 7)
        before = run_stage(name, **inputs)
        bad = int(rng.integers(0, 5))
        inputs["p"][1, bad] = np.nan
        inputs["logits"][1, bad, 3] = np.nan
        after = run_stage(name, **inputs)
        for output in after:
            assert (after[output][[0, 2]] == before[output][[0, 2]]).all()
        found = (int(after["accepted"][1]), int(after["next_token"][1]))
        if found[1] == -1:
            seen["fault"] += 1
            assert found[0] == bad <= inputs["valid"][1]
        else:
            seen["fine"] += 1
            assert found[0] != bad
            assert found[0] < bad or name == "verify-block" or inputs["valid"][1] < bad
    assert min(seen.values()) > 10


@pytest.mark.parametrize("name", SAMPLING)
def test_a_fault_is_reached_with_the_probability_of_its_context(name: str) -> None:
    """The proposals end before a row without a law, as if K were smaller: all before it is as it would be."""
    rng = np.random.default_rng(7)
    for _ in range(100):
        inputs = law_verification(rng, 1, 4, 7)
        bad = int(rng.integers(0, 5))
        shorter = {**inputs, "valid": np.minimum(inputs["valid"], bad)}
        expected = run_stage(name, **shorter)
        inputs["p"][0, bad] = np.nan
        found = run_stage(name, **inputs)
        fault = int(expected["accepted"][0]) == bad
        assert found["accepted"][0] == expected["accepted"][0]
        assert found["next_token"][0] == (-1 if fault else expected["next_token"][0])


@pytest.mark.parametrize("name", ["verify-residual", "verify-block"])
def test_a_proposal_without_a_law_is_not_accepted_and_the_target_draws(name: str) -> None:
    rng = np.random.default_rng(8)
    for _ in range(100):
        inputs = law_verification(rng, 1, 4, 7)
        bad = int(rng.integers(0, 4))
        shorter = {**inputs, "valid": np.minimum(inputs["valid"], bad)}
        expected = run_stage(name, **shorter)
        inputs["q"][0, bad] = np.nan
        found = run_stage(name, **inputs)
        assert found["accepted"][0] == expected["accepted"][0] <= bad
        assert found["next_token"][0] == expected["next_token"][0]


def test_propose_without_a_law_gives_a_token_and_a_q_that_is_not_a_number() -> None:
    outputs = run_stage(
        "propose",
        p=np.full((1, 1, 7), np.nan),
        uniforms=np.zeros((1, 2)),
        coupled=np.zeros(1),
        noise_keys=np.zeros((1, 2)),
        positions=np.zeros((1, 1)),
        step=np.zeros(1),
        q_in=np.zeros((1, 2, 7)),
        tokens_in=np.zeros((1, 3)),
    )
    assert outputs["token"].tolist() == [[0]]
    assert np.isnan(outputs["q_out"][0, 0]).all()
