"""Logits that are no numbers, and rows in which nothing may be said: they end their own row, with a clear error."""

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun import BackendError, Chunk, Decoder, Request, RequestError
from forerun.invariants import violations
from forerun.oracle import Tokens
from helpers.faults import FAULTS, NAN, VOCABULARY, faulty_throughout, wild_model, with_faults
from helpers.joint_law import p_value
from helpers.reference import decoded, joint_law
from helpers.table_models import TableModel, blurred, engine_directory, random_model
from helpers.three_sequences import add_without_driving, drive, rest

END = 7
TARGET = wild_model(1)
DRAFT = blurred(TARGET, seed=101)

LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    **{law: {"temperature": 1.0, "law": law} for law in ("coupled", "residual", "block")},
    "filtered": {"temperature": 1.0, "law": "residual", "top_k": 5, "top_p": 0.9},
}
# Tokens of the output before a fault. One within a run makes the run shorter, and block verification judges runs as a
# whole: it then says other tokens, of the same law.
SAID_BEFORE = {law: 0 if law == "block" else 3 for law in LAWS}
NEIGHBOURS = [
    Request.of([4], max_new_tokens=11, temperature=1.0, seed=6, draft_length=3, law="residual"),
    Request.of([5, 6], max_new_tokens=8, frequency_penalty=1.0, logprobs=2),
    Request.of([3, 1], max_new_tokens=10, temperature=1.2, seed=2, draft_length=5, top_p=0.8),
    Request.of([7], max_new_tokens=9, temperature=1.0, seed=3, draft="none"),
]


def request_of(law: str, prompt: tuple[int, ...] = (1, 2), **options: Any) -> Request:
    return Request.of(prompt, **{"seed": 5, "max_new_tokens": 12, "draft_length": 4, **LAWS[law], **options})


@cache
def alone() -> list[tuple[int, ...]]:
    """What each of NEIGHBOURS says."""
    return [decoded(TARGET, DRAFT, neighbour) for neighbour in NEIGHBOURS]


def tokens_of(decoder: Decoder, batch: list[Request]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in decoder.generate(batch)]


def open_with(folder: Path, target: TableModel, draft: TableModel = DRAFT, **options: Any) -> Decoder:
    return forerun.open(engine_directory(folder / "engines", target, draft, batch=5, **options))


def caches_of(decoder: Decoder) -> Iterator[list[float]]:
    for model in (decoder.target, decoder.draft.model):  # type: ignore[union-attr]
        for _, _, tensor in model.cache.tensors(0, model.cache.rows):
            yield decoder.backend.read_floats(tensor)


def read_into(said: list[int], stream: Iterator[Chunk]) -> None:
    for chunk in stream:
        said += chunk.token_ids


def check_unharmed(decoder: Decoder, failing: Request, error: type[Exception], match: str) -> tuple[int, ...]:
    """The failing request fails; its neighbours and all that follow say what they say alone. What it said before."""
    before, behind = ([add_without_driving(decoder, one) for one in NEIGHBOURS[part::2]] for part in range(2))
    said: list[int] = []
    with pytest.raises(error, match=match):
        read_into(said, decoder.stream(failing))
    for row, expected in zip([*before, *behind], [*alone()[::2], *alone()[1::2]], strict=True):
        drive(decoder, row)
        assert tuple(row.tokens[row.prompt_tokens :]) == expected
    assert violations(decoder) == []
    assert tokens_of(decoder, NEIGHBOURS) == alone()
    assert not any(math.isnan(value) for cache in caches_of(decoder) for value in cache)
    return tuple(said)


# Faults of the target

FAULTY = {
    (fault, law): request_of(law, (1, fault_number, law_number))
    for fault_number, fault in enumerate(FAULTS)
    for law_number, law in enumerate(LAWS)
}
"""A request whose row meets the fault after SAID_BEFORE tokens of its output."""


def right_output(request: Request) -> tuple[int, ...]:
    return decoded(TARGET, DRAFT, request)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    faults = [
        ([*request.prompt, *right_output(request)[: SAID_BEFORE[law]]], FAULTS[fault])
        for (fault, law), request in FAULTY.items()
    ]
    with open_with(tmp_path_factory.mktemp("faulty"), with_faults(TARGET, faults)) as decoder:
        yield decoder


@pytest.mark.parametrize(("law", "draft_length"), [*((law, 4) for law in LAWS), ("greedy", 1), ("coupled", 0)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_target_ends_its_own_row_behind_all_that_came_before(
    faulty: Decoder, fault: str, law: str, draft_length: int
) -> None:
    prompt, right = FAULTY[fault, law].prompt, right_output(FAULTY[fault, law])
    request = request_of(law, prompt, draft_length=draft_length)
    match = r"row 0: the target's logits are not finite \(NaN or infinite\); check its weights and this prompt"
    assert check_unharmed(faulty, request, BackendError, match) == right[: SAID_BEFORE[law]]


def test_the_error_names_the_row_by_its_number_in_the_batch(faulty: Decoder) -> None:
    failing = FAULTY["NaN in one logit", "coupled"]
    for number in range(len(NEIGHBOURS)):
        with pytest.raises(BackendError, match=f"^row {number}: the target's logits are not finite"):
            faulty.generate([*NEIGHBOURS[:number], failing, *NEIGHBOURS[number:]])
    with pytest.raises(BackendError, match=r"^row 2: the target's"):
        faulty.generate([Request.of([3], n=2, max_new_tokens=5), failing])


def test_edited_logits_that_are_not_finite_are_told_from_bans_as_far_as_can_be(faulty: Decoder) -> None:
    prompt = FAULTY["NaN in all logits", "greedy"].prompt
    with pytest.raises(RequestError, match=r"row 0: no token is left .* \(or the target's logits are not finite\)"):
        faulty.generate(request_of("greedy", prompt=prompt, logit_bias={0: -1e-6}))


def test_logits_of_minus_infinity_are_tokens_that_never_come(tmp_path: Path) -> None:
    target = faulty_throughout(TARGET, faults=[{2: -math.inf, 5: -math.inf}])
    draft = faulty_throughout(DRAFT, faults=[{3: -math.inf}])
    with open_with(tmp_path, target, draft) as decoder:
        batch = [request_of(law, max_new_tokens=30) for law in LAWS]
        found = tokens_of(decoder, batch)
    assert found == [decoded(target, draft, request) for request in batch]
    assert not any({2, 5} & set(tokens) for tokens in found)


def test_a_fault_behind_what_is_kept_does_not_count(tmp_path: Path) -> None:
    whole = right_output(request_of("greedy"))
    length = next(n for n in range(3, 12) if whole[n - 1] not in whole[: n - 1])
    said, rejected = whole[:length], next(token for token in range(VOCABULARY) if token != whole[0])
    fault = FAULTS["NaN in all logits"]
    # Behind a proposal that the target will not keep, and behind the stop token that it does keep.
    target = with_faults(TARGET, [([1, 2, rejected], fault), ([1, 2, *said], fault)])
    wrong = with_faults(TARGET, [([1, 2], {rejected: 99.0})])
    for name, draft in (("wrong", wrong), ("equal", TARGET)):
        with open_with(tmp_path / name, target, draft) as decoder:
            for draft_length in range(9):
                controls = {"stop_tokens": [said[-1]], "draft_length": draft_length, "logprobs": 1}
                generation = decoder.generate([1, 2], **controls)
                assert generation.token_ids == said
                assert len(generation.logprobs or ()) == length
                stats = generation.stats
                assert stats.emitted == stats.accepted + stats.corrections + stats.bonuses - stats.truncated


def test_a_row_that_fails_leaves_no_nan_in_its_caches(faulty: Decoder) -> None:
    stream = faulty.stream(request_of("greedy", FAULTY["NaN in all logits", "greedy"].prompt, draft_length=0))
    next(stream)
    for model in (faulty.target, faulty.draft.model):  # type: ignore[union-attr]
        for _, _, tensor in model.cache.tensors(0, 1):
            # As a model leaves it whose keys or values are no numbers: a stale slot that the mask does not cure.
            faulty.backend.write(tensor.view(1, offset=tensor.size - 1), [NAN])
    with pytest.raises(BackendError, match="not finite"):
        rest(stream)
    faulty.generate([3], max_new_tokens=1)  # the step that releases the row
    assert not any(math.isnan(value) for cache in caches_of(faulty) for value in cache)


# Faults of the draft


def test_faults_of_the_draft_change_no_greedy_or_coupled_token(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.5, "logit_bias": {3: -math.inf}}, {"top_k": 4}]
    draft = faulty_throughout(DRAFT, faults=[{}, *FAULTS.values()])
    with open_with(tmp_path, TARGET, draft) as decoder:
        for token in range(VOCABULARY):
            batch = [request_of(law, (token, 3), **more) for law in ("greedy", "coupled") for more in options]
            assert tokens_of(decoder, batch) == [right_output(request) for request in batch]


@pytest.mark.parametrize("law", ["residual", "block", "filtered"])
def test_no_proposal_of_a_draft_without_laws_is_accepted(tmp_path: Path, law: str) -> None:
    draft = faulty_throughout(DRAFT, faults=list(FAULTS.values()))
    with open_with(tmp_path, TARGET, draft) as decoder:
        for generation in decoder.generate([request_of(law, seed=seed) for seed in range(8)]):
            assert generation.stats.accepted == 0
            assert generation.stats.emitted == 12


@pytest.mark.parametrize("law", ["residual", "block"])
def test_with_a_draft_that_lacks_some_laws_the_output_still_has_the_targets(tmp_path: Path, law: str) -> None:
    samples = 2000
    target, other = (random_model(seed, vocabulary=5, context=10, spread=1.0) for seed in (21, 22))
    draft = faulty_throughout(other, faults=[{1: NAN}, {}, {}])
    request = Request.of([3], temperature=1.0, law=law, seed=1, n=samples, max_new_tokens=3, draft_length=2)
    with forerun.open(engine_directory(tmp_path / "engines", target, draft, batch=samples)) as decoder:
        found = decoder.generate([request])
    assert 0.1 < sum(one.stats.accepted for one in found) / sum(one.stats.proposed for one in found) < 0.6
    counts: Counter[Tokens] = Counter(one.token_ids for one in found)
    assert p_value(counts, joint_law(target, request)) > 1e-3


# Rows in which nothing may be said


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    with open_with(tmp_path_factory.mktemp("sound"), TARGET, end_tokens=[END]) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def unending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    with open_with(tmp_path_factory.mktemp("unending"), TARGET) as decoder:
        yield decoder


def ban_all_after(said: int) -> dict[str, Any]:
    """Controls that leave no token after `said` tokens of the greedy output."""
    right = right_output(request_of("greedy"))[:said]
    return {"bad_words": [[1, 2, *right, token] for token in range(VOCABULARY)]}


@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.parametrize("said", [0, 1, 2, 5])
def test_a_row_whose_tokens_are_all_banned_ends_with_an_error_and_alone(
    unending: Decoder, said: int, draft_length: int
) -> None:
    request = request_of("greedy", draft_length=draft_length, **ban_all_after(said))
    before = check_unharmed(unending, request, RequestError, "row 0: no token is left to choose from")
    assert before == right_output(request_of("greedy"))[:said]


@pytest.mark.parametrize(
    "controls",
    [
        {"logit_bias": dict.fromkeys(range(VOCABULARY), -math.inf)},
        {"logit_bias": {1: math.inf}, "bad_words": [[1]]},
        {"logit_bias": {END: math.inf}, "min_new_tokens": 1},
        {"no_repeat_ngram": 1, "logit_bias": {END: -math.inf}},
        {"bad_words": [[token] for token in range(VOCABULARY)]},
    ],
)
def test_every_way_to_ban_all_tokens_is_told_with_what_to_do(sound: Decoder, controls: dict[str, Any]) -> None:
    for law in LAWS:
        for logprobs in (None, 3):
            with pytest.raises(RequestError, match=r"row 0: no token is left .*; ban fewer tokens with bias"):
                sound.generate(request_of(law, logprobs=logprobs, **controls))
        with pytest.raises(RequestError, match=r"^row 1: no token is left"):
            sound.generate([NEIGHBOURS[0], request_of(law, **controls)])


def test_a_forced_end_comes_where_everything_is_banned(sound: Decoder) -> None:
    controls = {"logit_bias": dict.fromkeys(range(VOCABULARY), -math.inf), "force_end": True}
    assert sound.generate([1, 2], max_new_tokens=1, **controls).token_ids == (END,)
