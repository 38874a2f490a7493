"""What a request may ask for, and what is said of what it may not."""

import math
from array import array
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from forerun import Controls, Request, RequestError
from forerun.controls import LawName

BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.5}, "temperature is -0.5; give a finite number of at least 0"),
    ({"temperature": math.nan}, "temperature is nan; give a finite number"),
    ({"temperature": math.inf}, "temperature is inf; give a finite number"),
    ({"temperature": "hot"}, "temperature is 'hot'; give a finite number"),
    ({"temperature": True}, "temperature is True; give a finite number"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0; give a whole number of at least 1"),
    ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0; give a whole number"),
    ({"max_new_tokens": True}, "max_new_tokens is True; give a whole number"),
    ({"seed": -1}, "seed is -1; give a whole number of at least 0 and below 18446744073709551616"),
    ({"seed": 2**64}, "seed is 18446744073709551616; give a whole number of at least 0 and below"),
    ({"seed": 1.5}, "seed is 1.5; give a whole number"),
    ({"draft_length": -1}, "draft_length is -1; give a whole number of at least 0"),
    ({"draft_length": "auto"}, "draft_length is 'auto'; give a whole number"),
    ({"law": "fast"}, "unknown law 'fast'; known: auto, residual, block, coupled, greedy"),
    ({"draft": "best"}, "unknown draft 'best'; known: auto, model, ngram, none"),
    ({"stop": ""}, "stop: an empty text would end every output at once"),
    ({"stop": ["a", ""]}, "stop: an empty text would end every output at once"),
    ({"stop": [3]}, "stop: 3 is no text; give texts"),
    ({"stop": 3}, "stop: "),
    ({"stop": None}, "stop: "),
    ({"stop": b"end"}, "stop: b'end' is bytes, neither text nor token ids; decode it"),
    ({"stop": ["end", b"x"]}, "stop: b'x' is no text; give texts"),
    ({"stop": "half \udcff"}, "stop is no valid Unicode text at character 5, counted from 0"),
    ({"stop": ["end", "\ud800"]}, "stop is no valid Unicode text at character 0"),
    ({"bad_words": ["end", "x\ud800"]}, "bad_words is no valid Unicode text at character 1"),
    ({"bad_words": b"ab"}, "bad_words: b'ab' is bytes, neither text nor token ids"),
    ({"bad_words": [b"ab"]}, "bad_words: b'ab' is bytes, neither text nor token ids"),
    ({"bad_words": [np.array([[1, 2]])]}, "bad_words: [1, 2] is no token id; give whole numbers"),
    ({"stop_tokens": b"ab"}, "stop_tokens: b'ab' is bytes, neither text nor token ids"),
    ({"stop_tokens": np.array([1.0])}, "stop_tokens: 1.0 is no token id"),
    ({"stop_tokens": [np.float64(1)]}, "stop_tokens: np.float64(1.0) is no token id"),
    ({"logit_bias": {np.float32(1): 1.0}}, "logit_bias: np.float32(1.0) is no token id"),
    ({"logit_bias": {1: np.array([1.0])}}, "logit_bias of token 1 is array([1.]); give a number"),
    ({"logit_bias": {1: "1"}}, "logit_bias of token 1 is '1'; give a number"),
    ({"temperature": "0.5"}, "temperature is '0.5'; give a finite number"),
    ({"temperature": np.array([0.5])}, "temperature is array([0.5]); give a finite number"),
    ({"temperature": np.True_}, "temperature is np.True_; give a finite number"),
    ({"temperature": 1j}, "temperature is 1j; give a finite number"),
    ({"temperature": np.float32("nan")}, "temperature is np.float32(nan); give a finite number"),
    ({"temperature": np.float64(-1)}, "temperature is -1.0; give a finite number of at least 0"),
    ({"top_k": np.float64(2)}, "top_k is np.float64(2.0); give a whole number"),
    ({"top_k": np.int64(-2)}, "top_k is -2; give a whole number of at least 0"),
    ({"top_k": None}, "top_k is None; give a whole number"),
    ({"seed": torch.tensor(True)}, "seed is tensor(True); give a whole number"),
    ({"seed": torch.tensor([1, 2])}, "seed is tensor([1, 2]); give a whole number"),
    ({"raw": "no"}, "raw is 'no'; give True or False"),
    ({"force_end": 1}, "force_end is 1; give True or False"),
    ({"law": ["greedy"]}, "unknown law ['greedy']; known: auto"),
    ({"law": "greedy", "temperature": 0.5}, "law greedy needs temperature 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_a_value_that_means_nothing_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Controls(**options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1e-30},
        {"temperature": 1e30},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"max_new_tokens": 1},
        {"draft_length": 0},
        {"law": "greedy"},
        {"law": "residual", "temperature": 0.0},
    ],
)
def test_the_ends_of_every_range_are_taken(options: dict[str, Any]) -> None:
    for name, value in options.items():
        assert getattr(Controls(**options), name) == value


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.array(0.5), 0.5),
        ("temperature", torch.tensor(0.5), 0.5),
        ("temperature", np.int8(1), 1),
        ("top_p", Decimal("0.5"), 0.5),
        ("min_p", Fraction(1, 4), 0.25),
        ("repetition_penalty", np.float16(1.5), 1.5),
        ("presence_penalty", np.float64(-1), -1.0),
        ("frequency_penalty", torch.tensor(2), 2),
        ("top_k", np.int32(3), 3),
        ("no_repeat_ngram", torch.tensor(3), 3),
        ("min_new_tokens", np.uint8(3), 3),
        ("max_new_tokens", np.array(3), 3),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("draft_length", np.int64(2), 2),
        ("logprobs", np.int16(2), 2),
        ("n", np.int64(2), 2),
        ("raw", np.True_, True),
        ("force_end", np.array(True), True),
        ("stop_tokens", np.array([1, 2]), (1, 2)),
        ("stop_tokens", range(2), (0, 1)),
        ("stop_tokens", [np.int64(1), torch.tensor(2)], (1, 2)),
        ("bad_words", [np.array([1, 2]), array("L", [3]), "x"], ((1, 2), (3,), "x")),
        ("bad_words", np.array([[1, 2]]), ((1, 2),)),
        ("logit_bias", {np.int64(1): np.float32(0.5), 2: np.float64("-inf")}, {1: 0.5, 2: -math.inf}),
        ("logit_bias", {torch.tensor(1): Fraction(1, 2)}, {1: 0.5}),
    ],
)
def test_numbers_of_every_kind_become_plain_ones(name: str, value: Any, plain: Any) -> None:
    found = getattr(Controls(**{name: value}), name)
    assert found == plain
    assert types(found) == types(plain)


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return [(type(key), type(item)) for key, item in value.items()]
    return [types(item) for item in value] if isinstance(value, tuple) else type(value)


def test_what_is_given_may_change_afterwards() -> None:
    bias, words = {1: 1.0}, [[1, 2]]
    controls = Controls(logit_bias=bias, bad_words=words)
    bias[2] = 2.0
    words[0].append(3)
    assert (controls.logit_bias, controls.bad_words) == ({1: 1.0}, ((1, 2),))


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"unknown option .temprature.; known: logit_bias, .*temperature, top_k"):
        Request.of("Hello", temprature=1.0)


def test_one_stop_text_stands_for_a_list_of_one() -> None:
    assert Controls(stop="end").stop == ("end",)
    assert Controls(stop=["end", "END"]).stop == ("end", "END")


def test_auto_is_greedy_at_temperature_zero_coupled_with_a_seed_and_block_without() -> None:
    assert Controls().law_name == "greedy"
    assert Controls(temperature=0.1, seed=1).law_name == "coupled"
    assert Controls(temperature=0.1).law_name == "block"
    assert Controls(law="residual", temperature=0.1, seed=1).law_name == "residual"


@pytest.mark.parametrize("law", ["residual", "block", "coupled", "auto"])
def test_every_law_is_greedy_at_temperature_zero(law: LawName) -> None:
    assert Controls(law=law, seed=1).law_name == "greedy"
