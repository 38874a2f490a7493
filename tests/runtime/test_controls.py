"""What a request may ask for, and what is said of what it may not."""

import math
from typing import Any

import pytest

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
    ({"stop": [3]}, "stop: an empty text would end every output at once; give texts"),
    ({"stop": 3}, "stop: "),
    ({"stop": None}, "stop: "),
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
