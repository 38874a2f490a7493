"""Logits that are no numbers, and rows in which nothing may be said: they end their own row, with a clear error."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forerun
from forerun import BackendError, Chunk, Decoder, Request, RequestError
from forerun.invariants import violations
from forerun.model import CachedModel
from forerun.oracle import Tokens
from helpers.faults import FAULTS, NAN, faulty, faulty_throughout
from helpers.joint_law import p_value
from helpers.reference import decoded, joint_law
from helpers.table_models import TableModel, blurred, engine_directory, random_model
from helpers.three_sequences import add_without_driving, drive, rest

VOCABULARY = 8
PROMPT = [1, 2]
# A table so high, and weights so wild, that no other context than the one in question comes by the place of a fault.
NUMBERS = np.random.default_rng(1)
TARGET = TableModel(
    NUMBERS.normal(scale=1.5, size=(9973, VOCABULARY)).astype(np.float32),
    NUMBERS.permutation(97)[:VOCABULARY].astype(np.float32),
    NUMBERS.permutation(997)[:64].astype(np.float32),
)
DRAFT = blurred(TARGET, seed=101)
NOT_FINITE = r"row 0: the target's logits are not finite \(NaN or infinite\); check its weights and this prompt"
NOTHING_LEFT = "row 0: no token is left to choose from"

LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    **{law: {"temperature": 1.0, "law": law} for law in ("coupled", "residual", "block")},
    "filtered": {"temperature": 1.0, "law": "block", "top_k": 5, "top_p": 0.9},
}
NEIGHBOURS = [
    Request.of([4], max_new_tokens=18, temperature=1.0, seed=6, draft_length=3, law="residual"),
    Request.of([5, 6], max_new_tokens=11, frequency_penalty=1.0, logprobs=2),
    Request.of([3, 1], max_new_tokens=14, temperature=1.2, seed=2, draft_length=5, top_p=0.8),
    Request.of([7], max_new_tokens=9, temperature=1.0, seed=3, draft="none"),
]


def engines(folder: Path, target: TableModel, draft: TableModel = DRAFT, **options: Any) -> Path:
    return engine_directory(folder / "engines", target, draft, batch=5, **options)


def request_of(law: str, *, draft_length: int = 4, **options: Any) -> Request:
    controls = {"seed": 5, "max_new_tokens": 12, "draft_length": draft_length, **LAWS[law], **options}
    return Request.of(PROMPT, **controls)


def said_without_fault(request: Request) -> tuple[int, ...]:
    return decoded(TARGET, DRAFT, request)


def caches_of(decoder: Decoder) -> Iterator[list[float]]:
    models: list[CachedModel] = [decoder.target, decoder.draft.model]  # type: ignore[union-attr]
    for model in models:
        for _, _, tensor in model.cache.tensors(0, model.cache.rows):
            yield decoder.backend.read_floats(tensor)


def read_into(said: list[int], stream: Iterator[Chunk]) -> None:
    for chunk in stream:
        said += chunk.token_ids


def check_unharmed(decoder: Decoder, failing: Request, error: type[Exception], match: str) -> list[int]:
    """The failing request fails; its neighbours and all that follow say what they say alone. What it said before."""
    alone = [decoded(TARGET, DRAFT, neighbour) for neighbour in NEIGHBOURS]
    before, behind = ([add_without_driving(decoder, one) for one in part] for part in (NEIGHBOURS[:2], NEIGHBOURS[2:]))
    said: list[int] = []
    with pytest.raises(error, match=match):
        read_into(said, decoder.stream(failing))
    for row, expected in zip([*before, *behind], alone, strict=True):
        drive(decoder, row)
        assert tuple(row.tokens[row.prompt_tokens :]) == expected
    assert violations(decoder) == []
    assert not any(math.isnan(value) for cache in caches_of(decoder) for value in cache)
    for _ in range(2):
        again = decoder.generate(NEIGHBOURS)
        assert [one.token_ids for one in again] == alone
    return said


@pytest.mark.parametrize("draft_length", [0, 4])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_target_ends_its_own_row(tmp_path: Path, fault: str, law: str, draft_length: int) -> None:
    request = request_of(law, draft_length=draft_length)
    right = said_without_fault(request)
    for place in (0, 3):
        target = faulty(TARGET, [*PROMPT, *right[:place]], FAULTS[fault])
        with forerun.open(engines(tmp_path / str(place), target)) as decoder:
            said = check_unharmed(decoder, request, BackendError, NOT_FINITE)
        assert tuple(said) == right[: len(said)]
        assert len(said) <= place


def test_the_error_names_the_row_by_its_number_in_the_batch(tmp_path: Path) -> None:
    target = faulty(TARGET, PROMPT, FAULTS["NaN in one logit"])
    with forerun.open(engines(tmp_path, target)) as decoder:
        for number in range(3):
            batch = [*NEIGHBOURS[:number], Request.of(PROMPT), *NEIGHBOURS[number:]]
            with pytest.raises(BackendError, match=f"^row {number}: the target's logits are not finite"):
                decoder.generate(batch)
        with pytest.raises(BackendError, match=r"^row 2: the target's"):
            decoder.generate([Request.of([3], n=2, max_new_tokens=5), Request.of(PROMPT)])


def test_logits_of_minus_infinity_are_tokens_that_never_come(tmp_path: Path) -> None:
    target = faulty_throughout(TARGET, every=1, fault={2: -math.inf, 5: -math.inf})
    draft = faulty_throughout(DRAFT, every=1, fault={3: -math.inf})
    with forerun.open(engines(tmp_path, target, draft)) as decoder:
        for law in LAWS:
            request = request_of(law, max_new_tokens=30)
            (generation,) = decoder.generate([request])
            assert generation.token_ids == decoded(target, draft, request)
            assert not {2, 5} & set(generation.token_ids)


def test_a_fault_behind_what_is_kept_does_not_count(tmp_path: Path) -> None:
    whole = said_without_fault(request_of("greedy"))
    length = next(n for n in range(3, 12) if whole[n - 1] not in whole[: n - 1])
    said = whole[:length]
    other = next(token for token in range(VOCABULARY) if token != said[0])
    # Behind a proposal that the target will not keep, and behind the stop token that it does keep.
    for context in ([*PROMPT, other], [*PROMPT, *said]):
        target = faulty(TARGET, context, FAULTS["NaN in all logits"])
        draft = faulty(TARGET, PROMPT, {other: 99.0}) if len(context) == 3 else TARGET
        with forerun.open(engines(tmp_path / str(len(context)), target, draft)) as decoder:
            for draft_length in range(9):
                request = Request.of(PROMPT, stop_tokens=[said[-1]], draft_length=draft_length)
                assert decoder.generate(request).token_ids == said


def test_a_row_that_fails_leaves_no_nan_in_its_caches(tmp_path: Path) -> None:
    right = said_without_fault(request_of("greedy"))
    target = faulty(TARGET, [*PROMPT, *right[:6]], FAULTS["NaN in all logits"])
    with forerun.open(engines(tmp_path, target)) as decoder:
        stream = decoder.stream(request_of("greedy", draft_length=1))
        next(stream)
        for model in (decoder.target, decoder.draft.model):  # type: ignore[union-attr]
            for _, _, tensor in model.cache.tensors(0, 1):
                # As a model leaves it whose keys or values are no numbers: a stale slot that the mask does not cure.
                last = tensor.view(1, offset=tensor.size - 1)
                decoder.backend.write(last, [NAN])
        with pytest.raises(BackendError, match=NOT_FINITE):
            rest(stream)
        decoder.generate([3], max_new_tokens=1)  # releases the row
        assert not any(math.isnan(value) for cache in caches_of(decoder) for value in cache)


# Faults of the draft


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_draft_changes_no_greedy_or_coupled_token(tmp_path: Path, fault: str, every: int) -> None:
    draft = faulty_throughout(DRAFT, every=every, fault=FAULTS[fault])
    with forerun.open(engines(tmp_path, TARGET, draft)) as decoder:
        for law in ("greedy", "coupled"):
            for options in ({}, {"repetition_penalty": 1.5, "min_new_tokens": 3}, {"top_k": 4}):
                request = request_of(law, **options)
                (found,) = decoder.generate([request])
                assert found.token_ids == said_without_fault(request)


@pytest.mark.parametrize("law", ["residual", "block", "filtered"])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_proposal_of_a_draft_without_laws_is_accepted(tmp_path: Path, fault: str, law: str) -> None:
    draft = faulty_throughout(DRAFT, every=1, fault=FAULTS[fault])
    with forerun.open(engines(tmp_path, TARGET, draft)) as decoder:
        (generation,) = decoder.generate([request_of(law)])
    assert generation.stats.accepted == 0
    assert generation.stats.emitted == 12


@pytest.mark.parametrize("law", ["residual", "block"])
def test_with_a_draft_that_lacks_some_laws_the_output_still_has_the_targets(tmp_path: Path, law: str) -> None:
    small, context, samples = 5, 10, 2000
    target, draft = (random_model(seed, vocabulary=small, context=context, spread=1.0) for seed in (21, 22))
    draft = faulty_throughout(draft, every=3, fault={1: NAN})
    request = Request.of([3], temperature=1.0, law=law, seed=1, n=samples, max_new_tokens=3, draft_length=2)
    with forerun.open(engine_directory(tmp_path / "engines", target, draft, batch=samples)) as decoder:
        found = decoder.generate([request])
    assert 0.1 < sum(one.stats.accepted for one in found) / sum(one.stats.proposed for one in found) < 0.6
    counts: Counter[Tokens] = Counter(one.token_ids for one in found)
    assert p_value(counts, joint_law(target, request)) > 1e-3


# Rows in which nothing may be said


def ban_all_after(said: int) -> dict[str, Any]:
    """Controls that leave no token after `said` tokens."""
    if said == 0:
        return {"logit_bias": dict.fromkeys(range(VOCABULARY), -math.inf)}
    right = said_without_fault(request_of("greedy"))[:said]
    return {"bad_words": [[*PROMPT, *right, token] for token in range(VOCABULARY)]}


@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.parametrize("said", [0, 1, 2, 5])
def test_a_row_whose_tokens_are_all_banned_ends_with_an_error_and_alone(
    tmp_path: Path, said: int, draft_length: int
) -> None:
    with forerun.open(engines(tmp_path, TARGET)) as decoder:
        request = request_of("greedy", draft_length=draft_length, **ban_all_after(said))
        before = check_unharmed(decoder, request, RequestError, NOTHING_LEFT)
    assert tuple(before) == said_without_fault(request_of("greedy"))[: len(before)]
    assert len(before) <= said


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "controls",
    [
        {"logit_bias": dict.fromkeys(range(VOCABULARY), -math.inf)},
        {"logit_bias": {1: math.inf}, "bad_words": [[1]]},
        {"logit_bias": {7: math.inf}, "min_new_tokens": 1},
        {"no_repeat_ngram": 1, "max_new_tokens": 30, "logit_bias": {7: -math.inf}},
        {"bad_words": [[token] for token in range(VOCABULARY)]},
    ],
)
def test_every_way_to_ban_all_tokens_is_told_with_what_to_do(
    tmp_path: Path, law: str, controls: dict[str, Any]
) -> None:
    with forerun.open(engines(tmp_path, TARGET, end_tokens=[7])) as decoder:
        for options in (controls, {**controls, "logprobs": 3}):
            with pytest.raises(RequestError, match=f"{NOTHING_LEFT}.*; ban fewer tokens with bias"):
                decoder.generate(request_of(law, **options))
        with pytest.raises(RequestError, match=r"^row 1: no token is left"):
            decoder.generate([NEIGHBOURS[0], request_of(law, **controls)])


def test_a_forced_end_comes_where_everything_is_banned(tmp_path: Path) -> None:
    with forerun.open(engines(tmp_path, TARGET, end_tokens=[7])) as decoder:
        controls = {**ban_all_after(0), "force_end": True}
        assert decoder.generate(PROMPT, max_new_tokens=1, **controls).token_ids == (7,)
