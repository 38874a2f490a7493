"""Where sequences end, and where they hardly begin."""

import gc
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun import Request
from forerun.cache import CAPACITY_STEP
from forerun.engine import Tensor
from forerun.errors import RequestError
from forerun.invariants import violations
from forerun.model import PREFILL_CHUNK
from helpers.reference import greedy, sampled
from helpers.small_tokenizers import byte_level
from helpers.table_models import (
    DRAFTS,
    TableModel,
    byte_tokens,
    engine_directory,
    random_model,
    script_after,
    scripted,
    table_pair,
    words,
)

VOCABULARY = 10
END, OTHER_END = 7, 8


def scripted_engines(
    folder: Path, tokens: list[int], *, wrong_at: list[int] | None = None, prompt: int = 1, **options: Any
) -> Path:
    """A target that says `tokens` behind a prompt of `prompt` tokens, and a draft that is wrong at some of them."""
    options = {"end_tokens": (END, OTHER_END), **options}
    vocabulary = options["tokenizer"].get_vocab_size() if "tokenizer" in options else VOCABULARY
    target, draft = (
        scripted(script_after(prompt, tokens, wrong_at=wrong), vocabulary=vocabulary) for wrong in ([], wrong_at or [])
    )
    return engine_directory(folder, target, draft, **options)


def accepted_in_rounds(decoder: forerun.Decoder, prompt: Any, **controls: Any) -> list[tuple[int, ...]]:
    return [chunk.token_ids for chunk in decoder.stream(prompt, **controls)]


# Ends of sequences


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_an_end_token_among_the_accepted_ends_the_sequence_there(tmp_path: Path, end: int) -> None:
    engines = scripted_engines(tmp_path / "engines", [3, end, 4, 5, 6, 3])
    with forerun.open(engines) as decoder:
        generation = decoder.generate([1], draft_length=5, max_new_tokens=20)
    stats = generation.stats
    assert generation.token_ids == (3, end)
    assert generation.finish_reason == "stop"
    assert (stats.accepted, stats.bonuses, stats.truncated, stats.emitted) == (5, 1, 4, 2)


@pytest.mark.parametrize("place", range(6))
def test_an_end_token_at_any_place_of_a_round_gives_what_plain_decoding_gives(tmp_path: Path, place: int) -> None:
    said = [3, 4, 5, 6, 3, 4, 5]
    said[place] = END
    with forerun.open(scripted_engines(tmp_path / "engines", said, wrong_at=[4])) as decoder:
        plain = decoder.generate([1], draft="none")
        speculative = decoder.generate([1], draft_length=5)
    assert plain.token_ids == speculative.token_ids == tuple(said[: place + 1])
    assert plain.text == speculative.text
    assert plain.finish_reason == speculative.finish_reason == "stop"


def test_an_end_token_is_emitted_but_a_special_one_shows_no_text(tmp_path: Path) -> None:
    tokenizer = words(VOCABULARY)
    tokenizer.add_special_tokens([f"w{END}"])
    with forerun.open(scripted_engines(tmp_path / "engines", [3, END], tokenizer=tokenizer)) as decoder:
        generation = decoder.generate([1])
    assert (generation.token_ids, generation.text) == ((3, END), "w3")


def test_a_prompt_may_hold_end_tokens(tmp_path: Path) -> None:
    with forerun.open(scripted_engines(tmp_path / "engines", [3, 4, END], prompt=2)) as decoder:
        assert decoder.generate([END, END]).token_ids == (3, 4, END)


@pytest.mark.parametrize("limit", range(1, 14))
def test_the_limit_may_fall_anywhere_in_a_round(tmp_path: Path, limit: int) -> None:
    said = [3, 4, 5, 6] * 5
    with forerun.open(scripted_engines(tmp_path / "engines", said, wrong_at=[7])) as decoder:
        generation = decoder.generate([1], max_new_tokens=limit, draft_length=4)
    assert generation.token_ids == tuple(said[:limit])
    assert generation.finish_reason == "length"
    assert generation.stats.truncated == 0  # K shrinks to the room that is left


@pytest.mark.parametrize("draft_length", [0, 1, 2, 5])
@pytest.mark.parametrize("how", ["end token", "stop text"])
def test_stop_wins_where_stop_and_limit_fall_together(tmp_path: Path, how: str, draft_length: int) -> None:
    with forerun.open(scripted_engines(tmp_path / "engines", [3, 4, END if how == "end token" else 5, 6])) as decoder:
        generation = decoder.generate([1], max_new_tokens=3, stop=["w5"], draft_length=draft_length)
    assert (len(generation.token_ids), generation.finish_reason) == (3, "stop")


# Stop texts


def text_engines(folder: Path, text: str) -> tuple[Path, int]:
    """Target and draft say the bytes of `text`, one a token. Also the tokens' number."""
    tokenizer = byte_level()
    tokens = byte_tokens(tokenizer, text)
    model = scripted(script_after(1, tokens), vocabulary=tokenizer.get_vocab_size())
    return engine_directory(folder, model, model, tokenizer=tokenizer), len(tokens)


@pytest.mark.parametrize("draft_length", range(7))
def test_a_stop_text_is_found_across_rounds_and_nothing_behind_it_is_shown(tmp_path: Path, draft_length: int) -> None:
    engines, _ = text_engines(tmp_path / "engines", "one two STOP three")
    with forerun.open(engines) as decoder:
        generation = decoder.generate([1], stop=["STOP"], draft_length=draft_length)
        chunks = list(decoder.stream([1], stop=["STOP"], draft_length=draft_length))
    assert generation.text == "".join(chunk.text for chunk in chunks) == "one two "
    assert len(generation.token_ids) == len("one two STOP")
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize(
    ("stop", "shown", "emitted"),
    [("4", "w3 w", 2), ("3 w4", "w", 2), ("w4 w5 w6", "w3 ", 4), (" w5", "w3 w4", 3), ("w", "", 1)],
)
@pytest.mark.parametrize("draft_length", [0, 1, 2, 5])
def test_a_stop_text_may_begin_and_end_in_the_middle_of_tokens(
    tmp_path: Path, stop: str, shown: str, emitted: int, draft_length: int
) -> None:
    with forerun.open(scripted_engines(tmp_path / "engines", [3, 4, 5, 6, 3])) as decoder:
        generation = decoder.generate([1], stop=stop, draft_length=draft_length)
    assert (generation.text, len(generation.token_ids), generation.finish_reason) == (shown, emitted, "stop")


def test_what_might_have_become_a_stop_text_is_shown_at_the_end(tmp_path: Path) -> None:
    engines, count = text_engines(tmp_path / "engines", "one ST")
    with forerun.open(engines) as decoder:
        generation = decoder.generate([1], stop=["STOP"], max_new_tokens=count)
    assert (generation.text, generation.finish_reason) == ("one ST", "length")


def test_the_earliest_of_several_stop_texts_ends_the_output(tmp_path: Path) -> None:
    engines, _ = text_engines(tmp_path / "engines", "abcdef")
    with forerun.open(engines) as decoder:
        assert decoder.generate([1], stop=["ef", "cd", "zz"], draft_length=8).text == "ab"


@pytest.mark.parametrize("draft_length", [0, 2, 5])
def test_a_stop_text_that_waited_for_an_earlier_longer_one_counts_at_the_limit(
    tmp_path: Path, draft_length: int
) -> None:
    engines, _ = text_engines(tmp_path / "engines", "abcx")
    with forerun.open(engines) as decoder:
        generation = decoder.generate([1], stop=["abcd", "bc"], max_new_tokens=3, draft_length=draft_length)
    assert (generation.text, generation.finish_reason) == ("a", "stop")


# Rounds in which much or nothing is accepted


@pytest.mark.parametrize("agreed", range(7))
def test_a_draft_that_agrees_for_n_tokens_has_n_accepted(tmp_path: Path, agreed: int) -> None:
    said = [3, 4, 5, 6, 3, 4, 5, 6]
    with forerun.open(scripted_engines(tmp_path / "engines", said, wrong_at=[agreed])) as decoder:
        first, *_ = decoder.stream([1], draft_length=5, max_new_tokens=20)
    assert first.accepted == min(agreed, 5)
    assert first.token_ids == tuple(said[: min(agreed, 5) + 1])
    assert len(first.rejected) == max(5 - agreed, 0)


@pytest.mark.parametrize("draft_length", [1, 2, 4])
def test_after_many_full_rounds_the_drafts_cache_lacks_no_token(tmp_path: Path, draft_length: int) -> None:
    pair = table_pair(tmp_path / "engines", draft="equal", context=400)
    with pair.open() as decoder:
        generation = decoder.generate([5], max_new_tokens=390, draft_length=draft_length)
    # One missing slot would change the draft's law, and equal models would disagree.
    assert generation.stats.accepted == generation.stats.proposed
    assert generation.token_ids == greedy(pair.target, [5], 390)


# Room in the context


@pytest.mark.parametrize("room", range(1, 9))
@pytest.mark.parametrize("draft_length", [0, 1, 4, 8])
def test_a_prompt_may_leave_room_for_few_tokens(tmp_path: Path, room: int, draft_length: int) -> None:
    pair = table_pair(tmp_path / "engines", draft="equal", context=24)
    prompt = [place % 8 for place in range(24 - room)]
    with pair.open() as decoder:
        generation = decoder.generate(prompt, max_new_tokens=50, draft_length=draft_length)
    assert generation.token_ids == greedy(pair.target, prompt, room)
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("length", [24, 25, 1000])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(tmp_path: Path, length: int) -> None:
    with table_pair(tmp_path / "engines", context=24).open() as decoder:
        with pytest.raises(RequestError, match=f"the prompt has {length} tokens.* context of 24; shorten it"):
            decoder.generate([1] * length)
        assert decoder.generate([1] * 23).stats.emitted == 1


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(tmp_path: Path, prompt: Any) -> None:
    with (
        table_pair(tmp_path / "engines").open() as decoder,
        pytest.raises(RequestError, match=r"prompt is empty; give at least one token|with nothing in it"),
    ):
        decoder.generate(prompt, raw=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_of_one_token_is_enough(tmp_path: Path, temperature: float) -> None:
    pair = table_pair(tmp_path / "engines")
    with pair.open() as decoder:
        for token in range(8):
            controls = {"temperature": temperature, "seed": 2, "draft_length": 3}
            said = decoder.generate([token], max_new_tokens=9, law="residual", **controls)
            reference = sampled(pair.target, pair.draft, [token], 9, **controls) if temperature else None
            assert said.token_ids == (reference or greedy(pair.target, [token], 9))


# Long sequences

LONG = 2 * CAPACITY_STEP + 100


@pytest.mark.parametrize(
    "length",
    [PREFILL_CHUNK + extra for extra in (-1, 0, 1, 2)]
    + [2 * PREFILL_CHUNK + extra for extra in (0, 1, 2)]
    + [CAPACITY_STEP + extra for extra in (-5, -1, 0, 1)],
)
def test_prompts_of_about_a_chunk_or_a_capacity_step_lose_no_token(
    long_target: TableModel, tmp_path: Path, length: int
) -> None:
    prompt = [(place * place) % 8 for place in range(length)]
    engines = engine_directory(tmp_path / "engines", long_target, DRAFTS["good"](long_target))
    with forerun.open(engines) as decoder:
        assert decoder.generate(prompt, max_new_tokens=12).token_ids == greedy(long_target, prompt, 12)


@pytest.fixture(scope="module")
def long_target() -> TableModel:
    return random_model(3, context=LONG)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_cache_that_grows_while_decoding_keeps_every_row(long_target: TableModel, tmp_path: Path, draft: str) -> None:
    prompts = [[1] * (CAPACITY_STEP - 10), [2, 3], [4] * 200]
    engines = engine_directory(tmp_path / "engines", long_target, DRAFTS[draft](long_target))
    with forerun.open(engines) as decoder:
        requests = [Request.of(prompt, max_new_tokens=CAPACITY_STEP + 20, draft_length=4) for prompt in prompts]
        rows = [decoder._rows(request)[0] for request in requests]
        decoder._add(rows)
        capacities = set()
        while any(row.active for row in rows):
            decoder.scheduler.step()
            capacities.add(decoder.target.cache.capacity // CAPACITY_STEP)
    assert {1, 2, 3} & capacities >= {2, 3}
    for prompt, row in zip(prompts, rows, strict=True):
        assert tuple(row.tokens[len(prompt) :]) == greedy(long_target, prompt, CAPACITY_STEP + 20)


def test_memory_of_rows_that_have_ended_is_given_back_and_the_others_go_on(
    long_target: TableModel, tmp_path: Path
) -> None:
    engines = engine_directory(tmp_path / "engines", long_target, DRAFTS["good"](long_target))
    with forerun.open(engines) as decoder:
        lasting = decoder._rows(Request.of([7, 1], max_new_tokens=200, draft_length=3))[0]
        decoder._add(
            [decoder._rows(Request.of([place] * 300, max_new_tokens=9, draft_length=3))[0] for place in range(7)]
        )
        decoder._add([lasting])
        decoder.scheduler.step()
        assert (decoder.target.cache.rows, decoder.target.cache.capacity) == (8, 2 * CAPACITY_STEP)
        while len(decoder.scheduler.rows) > 1:
            decoder.scheduler.step()
        assert (decoder.target.cache.rows, decoder.target.cache.capacity) == (1, CAPACITY_STEP)
        gc.collect()
        caches = [tensor for tensor in gc.get_objects() if isinstance(tensor, Tensor) and len(tensor.shape) == 4]
        assert max(tensor.shape[0] for tensor in caches) == 1, "something still holds a cache of ended rows"
        assert violations(decoder) == []
        while lasting.active:
            decoder.scheduler.step()
        assert tuple(lasting.tokens[2:]) == greedy(long_target, [7, 1], 200)
        assert decoder.generate([2, 3], max_new_tokens=20).token_ids == greedy(long_target, [2, 3], 20)
