"""Controls at the ends of their ranges, and where two of them meet."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun import Decoder, Request, RequestError
from helpers.reference import decoded, greedy
from helpers.small_tokenizers import byte_level
from helpers.table_models import (
    TablePair,
    byte_tokens,
    engine_directory,
    script_after,
    scripted,
    table_pair,
)

VOCABULARY, END, OTHER_END = 8, 6, 7
LAWS = ["coupled", "residual", "block"]
PROMPTS = [[1], [2, 3, 4], [5] * 7]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines")


@pytest.fixture(scope="module")
def decoder(pair: TablePair) -> Iterator[Decoder]:
    with pair.open() as decoder:
        yield decoder


def batch(**controls: Any) -> list[Request]:
    options = {"temperature": 1.0, "max_new_tokens": 16, "draft_length": 3, **controls}
    return [Request.of(prompt, seed=seed, **options) for seed, prompt in enumerate(PROMPTS)]


def tokens_of(decoder: Decoder, requests: list[Request]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in decoder.generate(requests)]


# Filters and temperatures


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "controls",
    [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"top_p": 1e-300},
        {"min_p": 1.0},
        {"temperature": 1e-4},
        {"temperature": 1e-4, "top_k": 1, "top_p": 1e-9, "min_p": 1.0},
    ],
)
def test_a_law_with_one_token_is_greedy(pair: TablePair, decoder: Decoder, law: str, controls: dict[str, Any]) -> None:
    expected = [greedy(pair.target, prompt, 16) for prompt in PROMPTS]
    assert tokens_of(decoder, batch(law=law, **controls)) == expected


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "controls",
    [
        {"top_p": 1.0},
        {"top_k": VOCABULARY},
        {"top_k": 2**31 - 1},
        {"min_p": 1e-300},
        {"repetition_penalty": 1},
        {"presence_penalty": -0.0},
        {"logit_bias": {}},
        {"logit_bias": {3: 0.0}},
        {"logit_bias": dict.fromkeys(range(VOCABULARY), math.inf)},
        {"bad_words": [[0] * 40]},
        {"no_repeat_ngram": 50},
        {"min_new_tokens": 16},
    ],
)
def test_controls_that_change_nothing_change_nothing(decoder: Decoder, law: str, controls: dict[str, Any]) -> None:
    assert tokens_of(decoder, batch(law=law, **controls)) == tokens_of(decoder, batch(law=law))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("controls", [{}, {"top_k": 3}, {"top_p": 0.5}, {"frequency_penalty": 30.0}])
def test_a_high_temperature_flattens_what_the_other_controls_left(
    pair: TablePair, decoder: Decoder, law: str, controls: dict[str, Any]
) -> None:
    requests = batch(law=law, temperature=100.0, **controls)
    found = tokens_of(decoder, requests)
    assert found == [decoded(pair.target, pair.draft, request) for request in requests]
    if not controls:
        assert {token for tokens in found for token in tokens} == set(range(VOCABULARY))


@pytest.mark.parametrize("law", [*LAWS, "auto"])
def test_an_infinite_bias_of_one_token_says_nothing_else(decoder: Decoder, law: str) -> None:
    wanted = {"logit_bias": {3: math.inf, 1: 5.0}}
    others = {"logit_bias": {token: -math.inf for token in range(VOCABULARY) if token != 3}}
    for controls in (wanted, others):
        temperature = 0.0 if law == "auto" else 1.0
        found = tokens_of(decoder, batch(law=law, temperature=temperature, **controls))
        assert found == [(3,) * 16] * len(PROMPTS)


@pytest.mark.parametrize("bias", [1e9, -1e9])
def test_the_largest_finite_bias_and_penalties_leave_numbers(decoder: Decoder, bias: float) -> None:
    controls = {
        "logit_bias": {2: bias},
        "repetition_penalty": 1e-9 if bias > 0 else 1e9,
        "presence_penalty": -bias,
        "frequency_penalty": -bias,
    }
    for temperature in (0.0, 1.0):
        for tokens in tokens_of(decoder, batch(temperature=temperature, **controls)):
            assert len(tokens) == 16


# What means nothing


@pytest.mark.parametrize(
    ("controls", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0; give a finite number of at least 1e-09"),
        ({"repetition_penalty": -1.5}, "repetition_penalty is -1.5; give a finite number of at least 1e-09"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf; give a finite number"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan; give a finite number"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty is -inf; give a finite number"),
        ({"frequency_penalty": 1e30}, "frequency_penalty is 1e+30; give a finite number of at least -1"),
        ({"presence_penalty": 10**400}, "presence_penalty is 1000"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"top_k": -1}, "top_k is -1; give a whole number of at least 0"),
        ({"top_k": 2**64 + 1}, "top_k is 18446744073709551617; give a whole number"),
        ({"top_k": 1.5}, "top_k is 1.5; give a whole number"),
        ({"top_p": 0}, "top_p is 0; give a finite number above 0 up to 1"),
        ({"top_p": 1.01}, "top_p is 1.01; give a finite number above 0 up to 1"),
        ({"min_p": -0.1}, "min_p is -0.1; give a finite number of at least 0 up to 1"),
        ({"min_p": 1.1}, "min_p is 1.1; give a finite number of at least 0 up to 1"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram is -1; give a whole number of at least 0"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1; give a whole number of at least 0"),
        ({"min_new_tokens": 300}, "min_new_tokens is 300, above max_new_tokens, 256; lower it"),
        ({"logprobs": 21}, "logprobs is 21; give a whole number of at least 0 and below 21"),
        ({"logprobs": -1}, "logprobs is -1; give a whole number of at least 0 and below 21"),
        ({"n": 0}, "n is 0; give a whole number of at least 1"),
        ({"logit_bias": [1]}, "logit_bias is [1]; give a mapping from token ids to numbers"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias: 'a' is no token id"),
        ({"logit_bias": {True: 1.0}}, "logit_bias: True is no token id"),
        ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 is nan; give a number"),
        ({"logit_bias": {1: 1e30}}, "logit_bias of token 1 is 1e+30; give a number of at most 1e9 either way"),
        ({"logit_bias": {1: "x"}}, "logit_bias of token 1 is 'x'; give a number"),
        ({"bad_words": [[]]}, "bad_words: an empty one would ban every token"),
        ({"bad_words": ["a", ""]}, "bad_words: an empty one would ban every token"),
        ({"bad_words": [3]}, "bad_words: an empty one would ban every token; give texts or token sequences"),
        ({"bad_words": 3}, "bad_words: 3 is no list"),
        ({"bad_words": [["a"]]}, "bad_words: 'a' is no token id"),
        ({"stop_tokens": 3}, "stop_tokens: 3 is no list; give token ids"),
        ({"stop_tokens": "a"}, "stop_tokens: 'a' is no token id"),
        ({"stop_tokens": [1.0]}, "stop_tokens: 1.0 is no token id"),
    ],
)
def test_a_control_that_means_nothing_is_refused_by_name_in_one_line(controls: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Request.of([1], **controls)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("controls", "message"),
    [
        ({"logit_bias": {8: 1.0}}, "logit_bias: token 8 is not in the vocabulary of 8"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: token -1 is not in the vocabulary of 8"),
        ({"bad_words": [[1, 8]]}, "bad_words: token 8 is not in the vocabulary of 8"),
        ({"stop_tokens": [99]}, "stop_tokens: token 99 is not in the vocabulary of 8"),
        ({"force_end": True}, "force_end: this model has no end token; leave it out"),
    ],
)
def test_what_the_model_does_not_know_is_refused_before_any_work(
    decoder: Decoder, controls: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        decoder.generate([Request.of([1]), Request.of([2], **controls)])
    assert decoder.scheduler.rows == []


# Bans


@pytest.mark.parametrize("draft_length", [0, 1, 2, 8])
@pytest.mark.parametrize("length", [1, 2, 4, 7, 10])
def test_a_bad_word_may_be_longer_than_a_run(pair: TablePair, decoder: Decoder, length: int, draft_length: int) -> None:
    said = greedy(pair.target, [1, 2], 16)
    word = list(said[:length])
    request = Request.of([1, 2], bad_words=[word], max_new_tokens=16, draft_length=draft_length)
    (found,) = tokens_of(decoder, [request])
    assert found == decoded(pair.target, pair.draft, request)
    assert found[: length - 1] == said[: length - 1]
    assert not any(list(found[start:][:length]) == word for start in range(16))


def test_a_bad_word_may_begin_in_the_prompt(pair: TablePair, decoder: Decoder) -> None:
    first, second = greedy(pair.target, [1, 2], 2)
    found = decoder.generate([1, 2], bad_words=[[1, 2, first, second]], max_new_tokens=9).token_ids
    assert (found[0], found[1] == second) == (first, False)


def test_a_bad_word_as_text_is_banned_with_and_without_a_space_before_it(decoder: Decoder) -> None:
    found = decoder.generate([1, 2], bad_words=["w0 w3", "w5"], max_new_tokens=40, temperature=1.5, seed=2)
    assert 5 not in found.token_ids
    assert "w0 w3" not in found.text
    assert "w0" in found.text
    assert "w3" in found.text


# Ends


def says(folder: Path, tokens: list[int], **options: Any) -> Decoder:
    """Target and draft say `tokens` behind one token of prompt, and 0 after them."""
    model = scripted(script_after(1, tokens), vocabulary=VOCABULARY)
    options = {"end_tokens": [END, OTHER_END], **options}
    return forerun.open(engine_directory(folder / "engines", model, model, **options))


@pytest.mark.parametrize("draft_length", [0, 1, 3, 6])
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_end_tokens_in_a_run_are_passed_over_until_there_are_enough_tokens(
    tmp_path: Path, draft_length: int, temperature: float
) -> None:
    # An end at places 1 and 3 is too early; the script says 0 in its place. The one at place 5 ends the text.
    with says(tmp_path, [3, END, 4, OTHER_END, 5, END, 2]) as decoder:
        controls = {"draft_length": draft_length, "temperature": temperature, "seed": 1}
        found = decoder.generate([1], min_new_tokens=5, logit_bias={0: 1.0}, **controls)
    assert found.token_ids == (3, 0, 4, 0, 5, END)
    assert found.finish_reason == "stop"


@pytest.mark.parametrize("draft_length", [0, 1, 3, 6])
@pytest.mark.parametrize("law", ["auto", *LAWS])
def test_a_forced_end_is_the_last_token_that_the_limit_allows(
    pair: TablePair, tmp_path: Path, law: str, draft_length: int
) -> None:
    engines = engine_directory(tmp_path / "engines", pair.target, pair.draft, end_tokens=[END, OTHER_END])
    controls = {"law": law, "temperature": 0.0 if law == "auto" else 1.0, "draft_length": draft_length, "seed": 1}
    with forerun.open(engines) as decoder:
        no_end = {"logit_bias": {END: -math.inf, OTHER_END: -math.inf}, "force_end": True}
        for limit in (1, 2, 5, 12):
            found = decoder.generate([1, 2], max_new_tokens=limit, **no_end, **controls)
            assert (len(found.token_ids), found.token_ids[-1], found.finish_reason) == (limit, END, "stop")
            assert END not in found.token_ids[:-1]
        until_the_context_ends = decoder.generate([1] * 55, max_new_tokens=100, **no_end, **controls)
        assert (len(until_the_context_ends.token_ids), until_the_context_ends.token_ids[-1]) == (9, END)


@pytest.mark.parametrize("draft_length", [0, 1, 2, 6])
def test_a_stop_token_ends_the_text_as_an_end_token_does_and_is_told(tmp_path: Path, draft_length: int) -> None:
    with says(tmp_path, [3, 2, 5, 4, END]) as decoder:
        found = decoder.generate([1], stop_tokens=[4, 5], draft_length=draft_length)
        later = decoder.generate([1], stop_tokens=[2, 4], min_new_tokens=4, draft_length=draft_length)
    assert (found.token_ids, found.finish_reason) == ((3, 2, 5), "stop")
    # At place 1 the stop token is banned as an end token would be, at place 3 it no longer is.
    assert later.token_ids[:3] == (3, 0, 5)
    assert later.finish_reason == "stop"


@pytest.mark.parametrize("draft_length", [0, 1, 3, 8])
@pytest.mark.parametrize(
    ("stops", "shown", "emitted"),
    [
        (["cd", "abcde"], "", 5),  # the longer one begins first, and becomes complete
        (["cd", "abcx"], "ab", 4),  # the longer one begins first, and does not
        (["ab", "abc"], "", 2),  # both begin at once: the shorter is complete first
        (["abc", "ab"], "", 2),
        (["bc", "c"], "a", 3),
        (["c", "bcd"], "a", 4),
        (["fgh", "g"], "abcdef", 7),  # the longer one is begun when the text ends
        (["efghi", "fg"], "abcde", 7),
    ],
)
def test_of_two_stop_texts_of_which_one_contains_the_other_the_first_to_begin_counts(
    tmp_path: Path, stops: list[str], shown: str, emitted: int, draft_length: int
) -> None:
    tokenizer = byte_level()
    tokens = byte_tokens(tokenizer, "abcdefg")
    model = scripted(script_after(1, tokens), vocabulary=tokenizer.get_vocab_size())
    with forerun.open(engine_directory(tmp_path / "engines", model, model, tokenizer=tokenizer)) as decoder:
        controls = {"stop": stops, "draft_length": draft_length, "max_new_tokens": len(tokens)}
        found = decoder.generate([1], **controls)
        streamed = "".join(chunk.text for chunk in decoder.stream([1], **controls))
    assert found.text == streamed == shown
    assert (len(found.token_ids), found.finish_reason) == (emitted, "stop")
