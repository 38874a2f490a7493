"""Samples of one prompt, and what a request says again: alone, in any company, traced or streamed."""

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from forerun import Decoder, Generation, Request, RequestError
from forerun.trace import Trace
from helpers.table_models import TablePair, table_pair

BATCH = 3
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines", batch=BATCH)


@pytest.fixture(scope="module")
def decoder(pair: TablePair) -> Iterator[Decoder]:
    with pair.open() as decoder:
        yield decoder


def tokens_of(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in generations]


# Samples


@pytest.mark.parametrize("n", [2, BATCH, 3 * BATCH + 1])
@pytest.mark.parametrize("law", ["coupled", "block", "residual"])
def test_samples_are_n_in_their_order_with_seeds_of_their_own(decoder: Decoder, law: str, n: int) -> None:
    samples = decoder.generate([1, 2], n=n, law=law, **SAMPLED)
    assert len(samples) == n
    assert samples[0].seed == SAMPLED["seed"]
    assert len({one.seed for one in samples}) == n
    assert len(set(tokens_of(samples))) == n  # of 8^12 texts no two are the same by chance
    again = [decoder.generate([1, 2], law=law, **{**SAMPLED, "seed": one.seed}) for one in samples]
    assert tokens_of(again) == tokens_of(samples)


def test_more_samples_begin_with_the_same_ones(decoder: Decoder) -> None:
    few, many = (tokens_of(decoder.generate([1, 2], n=n, **SAMPLED)) for n in (2, 7))
    assert many[:2] == few


def test_in_a_batch_the_samples_of_a_prompt_follow_one_another(decoder: Decoder) -> None:
    batch = [Request.of([1], n=2, **SAMPLED), Request.of([2, 3]), Request.of([4], n=4, **SAMPLED)]
    found = tokens_of(decoder.generate(batch))
    alone = [tokens_of(decoder.generate([request])) for request in batch]
    assert found == [tokens for samples in alone for tokens in samples]
    assert list(map(len, alone)) == [2, 1, 4]


def test_one_sample_of_one_prompt_is_no_list_and_one_of_a_batch_is(decoder: Decoder) -> None:
    assert isinstance(decoder.generate([1], n=1, max_new_tokens=2), Generation)
    assert len(decoder.generate([[1]], n=1, max_new_tokens=2)) == 1


def test_without_a_seed_the_samples_differ_and_tell_their_seeds(decoder: Decoder) -> None:
    controls = {"temperature": 1.0, "max_new_tokens": 12, "draft_length": 3}
    samples = decoder.generate([1, 2], n=4, **controls)
    assert len(set(tokens_of(samples))) == 4
    for sample in samples:
        assert decoder.generate([1, 2], **controls, seed=sample.seed, law="block").token_ids == sample.token_ids


def test_samples_at_temperature_zero_are_the_same(decoder: Decoder) -> None:
    assert len(set(tokens_of(decoder.generate([1, 2], n=3, max_new_tokens=9)))) == 1


def test_a_stream_refuses_several_samples_at_once_and_before_any_work(decoder: Decoder) -> None:
    with pytest.raises(RequestError, match="n is 2: a stream carries one sample; open a stream for each"):
        decoder.stream([1], n=2)
    assert decoder.scheduler.rows == []


# The same request again

LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    **{law: {"law": law} for law in ("coupled", "block", "residual")},
    "coupled under controls": {"law": "coupled", "top_p": 0.8, "frequency_penalty": 0.7, "no_repeat_ngram": 3},
    "block under controls": {"law": "block", "top_k": 4, "repetition_penalty": 1.5, "logit_bias": {1: 1.0}},
    "residual under controls": {"law": "residual", "min_p": 0.1, "presence_penalty": 1.0, "bad_words": [[2, 3]]},
}
COMPANY = [
    Request.of([7], temperature=2.0, seed=1, law="residual", draft_length=8, max_new_tokens=20),
    Request.of([3, 3, 3, 3], temperature=1.0, seed=11, law="coupled", top_k=3, logprobs=5),
    Request.of([6, 1], frequency_penalty=1.0, draft="none", max_new_tokens=30),
]


def facts(generation: Generation) -> dict[str, Any]:
    """All that is to be the same: everything but the time and the bytes it took."""
    data = generation.to_json()
    timed = {"prefill_s", "decode_s", "tokens_per_s", "engine_s", "host_bytes_per_round"}
    data["stats"] = {name: value for name, value in data["stats"].items() if name not in timed}
    return data


@pytest.mark.parametrize("law", LAWS)
def test_a_request_says_the_same_alone_in_company_after_others_streamed_and_traced(
    pair: TablePair, decoder: Decoder, law: str
) -> None:
    request = Request.of([5, 2, 4], **{**SAMPLED, "draft_length": 3, **LAWS[law]})
    with pair.open() as fresh:
        expected = facts(fresh.generate([request])[0])

    assert facts(decoder.generate([request])[0]) == expected  # after whatever this decoder has said before
    for place in (0, 2, 3):
        batch = [*COMPANY[:place], request, *COMPANY[place:]]
        assert facts(decoder.generate(batch)[place]) == expected
    trace = Trace(Console(file=StringIO()), decoder.tokenizer)
    with_trace, without = [], []
    company = decoder.stream(COMPANY[0])
    for chunk, other in zip(decoder.stream(request), decoder.stream(request), strict=True):
        trace.round(chunk)
        with_trace += chunk.token_ids
        without += other.token_ids
        next(company, None)
    assert tuple(with_trace) == tuple(without) == tuple(expected["token_ids"])


@pytest.mark.parametrize("law", ["greedy", "coupled", "coupled under controls"])
def test_drafts_and_draft_lengths_do_not_change_what_greedy_and_coupled_requests_say(
    decoder: Decoder, law: str
) -> None:
    options = {**SAMPLED, **LAWS[law]}
    plain = decoder.generate([5, 2, 4], draft="none", **options)
    for draft_length in (1, 2, 5, 8):
        assert decoder.generate([5, 2, 4], draft_length=draft_length, **options).token_ids == plain.token_ids


@pytest.mark.parametrize("law", ["block", "residual"])
def test_a_draft_length_that_is_chosen_makes_block_and_residual_repeatable(decoder: Decoder, law: str) -> None:
    said = {
        length: decoder.generate([5, 2, 4], draft_length=length, law=law, **SAMPLED).token_ids for length in (1, 2, 3)
    }
    for length, tokens in said.items():
        assert decoder.generate([5, 2, 4], draft_length=length, law=law, **SAMPLED).token_ids == tokens
    assert len(set(said.values())) > 1  # another draft length is another request under these laws
