"""The suffix automaton against a search of the whole text."""

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.suffixes import COUNTED_SUFFIXES, Step, SuffixAutomaton


def automaton_of(tokens: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.append(token)
    return automaton


def steps(tokens: Sequence[int], count: int) -> list[Step]:
    return list(itertools.islice(automaton_of(tokens).continuation(), count))


def searched(tokens: Sequence[int]) -> Step | None:
    """The first step, by looking at every place."""
    for length in range(len(tokens) - 1, 0, -1):
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if ends:
            followed = Counter(tokens[end] for end in ends)
            latest = {tokens[end]: end for end in ends}
            token = max(followed, key=lambda token: (followed[token], latest[token]))
            return Step(token, length, unanimous=len(followed) == 1)
    return None


@given(st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=COUNTED_SUFFIXES)))
def test_the_first_step_is_what_most_often_followed_the_longest_match(tokens: list[int]) -> None:
    assert next(automaton_of(tokens).continuation(), None) == searched(tokens)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40))
def test_looking_changes_nothing(tokens: list[int], place: int) -> None:
    automaton = automaton_of(tokens[:place])
    list(itertools.islice(automaton.continuation(), 7))
    for token in tokens[place:]:
        automaton.append(token)
    assert list(itertools.islice(automaton.continuation(), 9)) == steps(tokens, 9)


def test_a_copy_goes_on_to_its_end_and_matches_get_longer() -> None:
    found = steps([10, 11, 12, 13, 14, 15, 99, 10, 11, 12], 4)
    assert found == [Step(13 + ahead, 3 + ahead, unanimous=True) for ahead in range(3)] + [Step(99, 6, unanimous=True)]


@pytest.mark.parametrize("period", [1, 2, 5])
def test_what_repeats_goes_on_repeating(period: int) -> None:
    tokens = [place % period for place in range(30)]
    assert [step.token for step in steps(tokens, 12)] == [place % period for place in range(30, 42)]


def test_of_continuations_the_most_frequent_comes_first_then_the_latest() -> None:
    assert steps([1, 2, 1, 2, 1, 3, 9, 1], 1) == [Step(2, 1, unanimous=False)]
    assert steps([1, 2, 7, 1, 3, 9, 1], 1) == [Step(3, 1, unanimous=False)]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_nothing_is_known_of_what_has_not_been(tokens: list[int]) -> None:
    assert steps(tokens, 3) == []
