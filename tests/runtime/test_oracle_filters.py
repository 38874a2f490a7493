"""Edits and filters of the oracle, on numbers that can be checked by hand."""

import math

import pytest

from forerun.oracle import Edit, edited, filtered_law, law_of

LOGITS = [math.log(weight) for weight in (1, 2, 3, 4)]  # the law is .1 .2 .3 .4


def test_no_filter_is_the_plain_law() -> None:
    assert filtered_law(LOGITS, 0.7) == pytest.approx(law_of(LOGITS, 0.7), abs=1e-15)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_k": 9}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_p": 0.39}, [0, 0, 0, 1]),
        ({"top_p": 0.41}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 1e-9}, [0, 0, 0, 1]),
        ({"min_p": 0.49}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"min_p": 1.0}, [0, 0, 0, 1]),
        ({"top_k": 3, "top_p": 0.8, "min_p": 0.7}, [0, 0, 3 / 7, 4 / 7]),
    ],
)
def test_filters_keep_what_they_should(filters: dict[str, float], expected: list[float]) -> None:
    assert filtered_law(LOGITS, 1.0, **filters) == pytest.approx(expected)  # type: ignore[arg-type]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    """.4 is 44% of the .9 that are left: the nucleus of .42 ends there, though .4 < .42 of the whole."""
    assert filtered_law(LOGITS, 1.0, top_k=3, top_p=0.42) == pytest.approx([0, 0, 0, 1])
    assert filtered_law(LOGITS, 1.0, top_p=0.42) == pytest.approx([0, 0, 3 / 7, 4 / 7])


def test_filters_come_after_the_temperature() -> None:
    assert filtered_law(LOGITS, 0.5, min_p=0.3) == pytest.approx([0, 0, 9 / 25, 16 / 25])


def test_equal_logits() -> None:
    """Top-k keeps all that equal the k-th; a nucleus ends with the highest tokens; min-p parts no equals."""
    tied = [1.0, 0.0, 1.0, 1.0]
    assert filtered_law(tied, 1.0, top_k=1) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    assert filtered_law(tied, 1.0, top_k=1, top_p=0.5) == pytest.approx([0, 0, 0.5, 0.5])
    assert filtered_law(tied, 1.0, min_p=1.0) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


def test_at_temperature_zero_filters_change_nothing() -> None:
    assert filtered_law([1.0, 3.0, 3.0], 0, top_k=1, top_p=0.1, min_p=1.0) == [0, 1, 0]


def test_edits_add_the_bias_then_penalise_then_shift() -> None:
    logits = [2.0, -2.0, 5.0, 1.0, 0.0]
    edits = {0: Edit(penalty=2), 1: Edit(penalty=2), 2: Edit(bias=-6, penalty=2, shift=1), 3: Edit(shift=math.inf)}
    assert edited(logits, edits) == [1.0, -4.0, -3.0, -math.inf, 0.0]


def test_only_rules_out_what_is_not_listed() -> None:
    assert edited([1.0, 2.0, 3.0], {1: Edit(bias=1.0)}, only=True) == [-math.inf, 3.0, -math.inf]
