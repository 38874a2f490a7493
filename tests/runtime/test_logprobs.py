"""Log-probabilities: of every emitted token alike, under the law it came from, whatever proposed it."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun import Decoder, Generation, Request
from helpers.reference import logprobs_at
from helpers.table_models import DRAFT_LENGTH, TablePair, engine_directory, random_model, scripted, table_pair

VOCABULARY, END = 8, 7
NEAR = {"rel": 1e-5, "abs": 1e-5}

CONTROLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "hot": {"temperature": 2.5, "law": "residual"},
    "filtered": {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "law": "block"},
    "edited": {"temperature": 0.8, "repetition_penalty": 1.6, "frequency_penalty": 0.5, "no_repeat_ngram": 2},
    "greedy and edited": {"presence_penalty": 1.5, "logit_bias": {0: 2.0, 1: -math.inf}, "force_end": True},
    "greedy, filters given": {"top_k": 2, "min_p": 0.4},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines", end_tokens=[END])


@pytest.fixture(scope="module")
def decoder(pair: TablePair) -> Iterator[Decoder]:
    with pair.open() as decoder:
        yield decoder


def request_of(control: str, *, prompt: tuple[int, ...] = (1, 2), **options: Any) -> Request:
    return Request.of(prompt, **{"seed": 3, "max_new_tokens": 16, "logprobs": 4, **CONTROLS[control], **options})


def check(pair: TablePair, request: Request, generation: Generation) -> None:
    """Every entry is the reference's: the token's own, and the likeliest in their order."""
    output, controls = generation.token_ids, request.controls
    assert generation.logprobs is not None
    assert tuple(entry.token for entry in generation.logprobs) == output
    for place, entry in enumerate(generation.logprobs):
        room = controls.max_new_tokens - place
        law = logprobs_at(pair.target, request, list(output[:place]), ends=[END], room=room)
        assert entry.logprob == pytest.approx(law[entry.token], **NEAR)
        likeliest = sorted(range(VOCABULARY), key=lambda token: -law[token])
        possible = [token for token in likeliest if law[token] > -math.inf][: controls.logprobs]
        assert [token for token, _ in entry.top] == possible
        assert [logprob for _, logprob in entry.top] == pytest.approx([law[x] for x in possible], **NEAR)


@pytest.mark.parametrize("draft_length", [0, 1, DRAFT_LENGTH])
@pytest.mark.parametrize("control", CONTROLS)
def test_accepted_corrected_and_bonus_tokens_have_the_targets_log_probabilities(
    pair: TablePair, decoder: Decoder, control: str, draft_length: int
) -> None:
    batch = [request_of(control, prompt=(seed, 2), seed=seed, draft_length=draft_length) for seed in range(7)]
    generations = decoder.generate(batch)
    for request, generation in zip(batch, generations, strict=True):
        check(pair, request, generation)
    stats = [one.stats for one in generations]
    assert sum(one.bonuses for one in stats) > 0
    assert draft_length == 0 or min(sum(one.accepted for one in stats), sum(one.corrections for one in stats)) > 0


@pytest.mark.parametrize("control", ["greedy", "sampled", "edited", "greedy and edited"])
def test_they_are_bit_for_bit_those_of_plain_decoding_alone_or_in_a_batch(decoder: Decoder, control: str) -> None:
    (plain,) = decoder.generate([request_of(control, draft="none")])
    for draft_length in (1, 4):
        others = [request_of(other, draft_length=3, logprobs=None) for other in CONTROLS]
        found, *rest = decoder.generate([request_of(control, draft_length=draft_length), *others])
        assert found.logprobs == plain.logprobs
        assert all(one.logprobs is None for one in rest)


def test_rows_get_as_many_alternatives_as_each_asked_for(decoder: Decoder) -> None:
    wanted = [0, None, 2, VOCABULARY, 20]
    found = decoder.generate([request_of("sampled", logprobs=count) for count in wanted])
    full = found[-1].logprobs
    assert full is not None
    for count, one in zip(wanted, found, strict=True):
        if count is None:
            assert one.logprobs is None
        else:
            assert one.logprobs is not None
            assert [entry.top for entry in one.logprobs] == [entry.top[:count] for entry in full]
    assert {len(entry.top) for entry in full} == {VOCABULARY}  # there are no more tokens


@pytest.mark.parametrize("control", ["filtered", "greedy and edited"])
def test_what_cannot_come_is_no_alternative_and_is_never_chosen(decoder: Decoder, control: str) -> None:
    for generation in decoder.generate([request_of(control, seed=seed, logprobs=20) for seed in range(20)]):
        for entry in generation.logprobs or ():
            assert entry.logprob > -math.inf
            assert all(logprob > -math.inf for _, logprob in entry.top)
            assert entry.token in [token for token, _ in entry.top]
            assert sum(math.exp(logprob) for _, logprob in entry.top) == pytest.approx(1.0, **NEAR)


@pytest.mark.parametrize("stop", [{"stop": ["w4"]}, {"stop_tokens": [4]}, {"max_new_tokens": 3}])
@pytest.mark.parametrize("draft_length", [0, 2, 6])
def test_they_end_with_the_tokens(tmp_path: Path, stop: dict[str, Any], draft_length: int) -> None:
    model = scripted({1: 3, 2: 5, 3: 4, 4: 2, 5: 2}, vocabulary=VOCABULARY)
    with forerun.open(engine_directory(tmp_path / "engines", model, model)) as decoder:
        generation = decoder.generate([1], draft_length=draft_length, logprobs=1, **stop)
        chunks = list(decoder.stream([1], draft_length=draft_length, logprobs=1, **stop))
    assert generation.token_ids == (3, 5, 4)
    assert [entry.token for entry in generation.logprobs or ()] == [3, 5, 4]
    assert [entry for chunk in chunks for entry in chunk.logprobs] == list(generation.logprobs or ())
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)


def test_chunks_carry_none_where_none_are_asked_for(decoder: Decoder) -> None:
    assert all(chunk.logprobs == () for chunk in decoder.stream([1], max_new_tokens=5))


def test_a_vocabulary_of_several_blocks_is_searched_whole(tmp_path: Path) -> None:
    target = random_model(8, vocabulary=200)
    pair = TablePair(engine_directory(tmp_path / "engines", target, target), target, target)
    with pair.open() as decoder:
        for control in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 7}):
            request = Request.of([1, 2], seed=3, max_new_tokens=4, logprobs=20, **control)
            (generation,) = decoder.generate([request])
            for place, entry in enumerate(generation.logprobs or ()):
                law = logprobs_at(target, request, list(generation.token_ids[:place]))
                likeliest = sorted(range(200), key=lambda token: -law[token])[:20]
                possible = [token for token in likeliest if law[token] > -math.inf]
                assert [token for token, _ in entry.top] == possible
                assert entry.logprob == pytest.approx(law[entry.token], **NEAR)
