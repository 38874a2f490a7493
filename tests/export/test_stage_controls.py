"""Edits, filters and log-probabilities: what the oracle says, and what Hugging Face transformers does."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from forerun.oracle import Edit, edited, filtered_law, law_of
from forerun_export.sampling.filters import CANDIDATES
from helpers.filtering import assert_same_law, filters, hugging_face, tied_logits
from helpers.sampling import Array, Random
from helpers.sampling_cases import make_logits
from helpers.stages import run_stage


@pytest.mark.parametrize(("vocabulary_size", "calls"), [(1, 10), (2, 40), (7, 100), (300, 100), (1000, 40)])
def test_filters_give_the_law_of_the_oracle_and_of_transformers(
    vocabulary_size: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, cases, rounded = np.random.default_rng(vocabulary_size), 0, 0
    for _ in range(calls):
        controls = filters(rng, 3)
        logits = tied_logits(rng, 3, 2, vocabulary_size)
        p = run_stage("law-filtered", logits=logits, **controls)["p"]
        for b, r in np.ndindex(3, 2):
            values = {name: value[b].item() for name, value in controls.items() if name != "temperature"}
            oracle = np.array(filtered_law(logits[b, r].tolist(), controls["temperature"][b].item(), **values))
            cases += 1
            rounded += assert_same_law(p[b, r], oracle, logits[b, r], controls, b)
            hf = hugging_face(logits[b, r], controls, b, monkeypatch)
            assert_same_law(p[b, r], hf, logits[b, r], controls, b)
    assert rounded <= max(1, cases / 25)  # equal logits make exact edges common


@pytest.mark.parametrize("kept", [1, 200, CANDIDATES - 1, CANDIDATES, CANDIDATES + 1, 500, 3000])
def test_wide_and_narrow_nuclei_are_exact_at_a_real_vocabulary_size(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides of the number of candidates that are tried first."""
    rng = np.random.default_rng(kept)
    logits = rng.standard_normal((2, 1, 20_000)).astype(np.float32)
    for row in logits[:, 0]:
        row[rng.permutation(20_000)[:kept]] += 30
    controls = {
        "temperature": np.array([1.0, 0.7], np.float32),
        "top_k": np.array([0, kept + kept // 2]),
        "top_p": np.array([0.98, 1.0], np.float32),
        "min_p": np.zeros(2, np.float32),
    }
    p = run_stage("law-filtered", logits=logits, **controls)["p"]
    for b in range(2):
        assert_same_law(p[b, 0], hugging_face(logits[b, 0], controls, b, monkeypatch), logits[b, 0], controls, b)
    assert (p[1] > 0).sum() == kept + kept // 2


@pytest.mark.parametrize("controls", [{"top_p": 0.5013}, {"top_p": 0.5013, "top_k": 900}, {"top_p": 1e-6}])
def test_of_equals_at_the_edge_of_a_nucleus_the_last_are_kept(controls: dict[str, float]) -> None:
    for size in (10, 600, 1000):  # fewer equals than candidates, and more
        neutral: dict[str, float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        values = {name: [value] for name, value in {**neutral, **controls}.items()}
        p = run_stage("law-filtered", logits=np.zeros((1, 1, size)), temperature=[1.0], **values)["p"][0, 0]
        count = math.ceil(size * controls["top_p"])
        assert np.flatnonzero(p).tolist() == list(range(size - count, size))


@pytest.mark.parametrize("vocabulary_size", [7, 300, 3000])
def test_rows_without_filters_are_those_of_the_plain_law_to_the_bit(vocabulary_size: int) -> None:
    rng = np.random.default_rng(1)
    logits = make_logits(rng, 3, 2, vocabulary_size)
    temperature = np.array([0.7, 0.0, 1.0])
    plain = run_stage("law", logits=logits, temperature=temperature)["p"]
    for top_p in (1e-6, 0.5, 0.999999):  # of the last row, which may or may not need a whole search
        p = run_stage(
            "law-filtered",
            logits=logits,
            temperature=temperature,
            top_k=[0, 3, 0],
            top_p=[1.0, 0.5, top_p],
            min_p=[0.0, 0.5, 0.0],
        )["p"]
        assert p[:2].tobytes() == plain[:2].tobytes()


def test_filtered_rows_have_the_same_bits_whatever_their_neighbours_need() -> None:
    rng = np.random.default_rng(2)
    for _ in range(10):
        logits, controls = tied_logits(rng, 4, 2, 2000), filters(rng, 4)
        alone = run_stage(
            "law-filtered", logits=logits[:1, 1:], **{name: value[:1] for name, value in controls.items()}
        )["p"]
        together = run_stage("law-filtered", logits=logits, **controls)["p"]
        assert alone[0, 0].tobytes() == together[0, 1].tobytes()


def test_filters_that_keep_one_token_leave_the_likeliest() -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((1, 4, 500)).astype(np.float32)
    for single in ({"top_k": [1]}, {"top_p": [1e-9]}, {"top_p": [0.0]}, {"min_p": [1.0]}):
        neutral: dict[str, Any] = {"top_k": [0], "top_p": [1.0], "min_p": [0.0]}
        p = run_stage("law-filtered", logits=logits, temperature=[1.5], **{**neutral, **single})["p"]
        assert (p[0] == np.eye(500)[logits[0].argmax(-1)]).all()


# Edits.


def run_edit(logits: Array, edits: list[dict[int, Edit]], *, entries: int, only: bool = False, rng: Random) -> Array:
    """Row r of [1,R,V] logits with its edits, padded to `entries` by repeating one of them."""
    padded = [[*row.items(), *[list(row.items())[int(rng.integers(len(row)))]] * (entries - len(row))] for row in edits]
    fields = np.array([[edit for _, edit in row] for row in padded])
    return run_stage(
        "edit",
        logits=logits,
        edit_tokens=[[[token for token, _ in row] for row in padded]],
        edit_bias=fields[None, ..., 0],
        edit_penalty=fields[None, ..., 1],
        edit_shift=fields[None, ..., 2],
        only=np.full(logits.shape[:2], only),
    )["edited"]


@pytest.mark.parametrize("only", [False, True])
def test_edits_change_listed_tokens_as_the_oracle_does(only: bool) -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        logits = make_logits(rng, 1, 3, 40)
        edits = [
            {
                int(x): Edit(
                    *rng.choice([0.0, 1.5, -np.inf], 1), *rng.choice([1, 1.3, 0.7], 1), *rng.choice([0, 2.5, np.inf], 1)
                )
                for x in rng.permutation(40)[: rng.integers(1, 9)]
            }
            for _ in range(3)
        ]
        found = run_edit(logits, edits, entries=9, only=only, rng=rng)
        expected = [edited(logits[0, r].tolist(), edits[r], only=only) for r in range(3)]
        np.testing.assert_allclose(found[0], expected, rtol=1e-6)


def test_edits_leave_all_other_logits_to_the_bit() -> None:
    rng = np.random.default_rng(5)
    logits = make_logits(rng, 1, 2, 300)
    found = run_edit(logits, [{3: Edit(shift=math.inf)}, {7: Edit()}], entries=4, rng=rng)
    logits[0, 0, 3] = -np.inf
    assert found.tobytes() == logits.tobytes()


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((1, 1, 50)).astype(np.float32)
    logits[0, 0, 5] = 0.0
    seen = [5, 9, 30, 31]
    found = run_edit(logits, [{x: Edit(penalty=1.3) for x in seen}], entries=6, rng=rng)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seen]), torch.tensor(logits[0]))
    np.testing.assert_allclose(found[0], expected.numpy(), rtol=1e-6)


# Log-probabilities.


@pytest.mark.parametrize("vocabulary_size", [3, 20, 300])
def test_logprobs_are_those_of_the_law_and_at_temperature_zero_of_the_softmax(vocabulary_size: int) -> None:
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((3, 2, vocabulary_size)).astype(np.float32) * 3
    temperature = np.array([0.7, 0.0, 1.3])
    p = run_stage(
        "law-filtered", logits=logits, temperature=temperature, top_k=[2, 2, 0], top_p=[1.0] * 3, min_p=[0.0] * 3
    )["p"].copy()
    p[1] = np.nan  # not looked at
    tokens = rng.integers(0, vocabulary_size, (3, 2))
    outputs = run_stage("logprobs", p=p, logits=logits, temperature=temperature, tokens=tokens)
    for b, r in np.ndindex(3, 2):
        law = np.array(law_of(logits[b, r].tolist(), 1.0)) if b == 1 else p[b, r].astype(np.float64)
        with np.errstate(divide="ignore"):
            logs = np.log(law)
        assert outputs["logprob"][b, r] == pytest.approx(logs[tokens[b, r]], abs=2e-6)
        count = min(20, vocabulary_size)
        np.testing.assert_allclose(outputs["top_logprobs"][b, r], np.sort(logs)[::-1][:count], atol=2e-6)
        np.testing.assert_allclose(logs[outputs["top_tokens"][b, r]], outputs["top_logprobs"][b, r], atol=2e-6)
        assert len(set(outputs["top_tokens"][b, r].tolist())) == count


def test_logprobs_of_rows_behind_the_emitted_ones_may_be_asked_for_with_garbage() -> None:
    outputs = run_stage(
        "logprobs", p=np.full((1, 2, 7), 1 / 7), logits=np.zeros((1, 2, 7)), temperature=[1.0], tokens=[[-1, 2**40]]
    )
    np.testing.assert_allclose(outputs["logprob"], -math.log(7), rtol=1e-5)
