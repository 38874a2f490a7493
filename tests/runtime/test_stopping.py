import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.stopping import StopMatcher

stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    return shown, matcher.matched


def on_whole_text(stops: list[str], text: str) -> tuple[str, str | None]:
    found = sorted((text.find(stop), len(stop), stop) for stop in stops if stop in text)
    return (text[: found[0][0]], found[0][2]) if found else (text, None)


@settings(deadline=None, max_examples=250)
@given(stop_lists, st.lists(st.text("abc", max_size=6), max_size=12))
def test_any_chunking_cuts_where_the_whole_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == on_whole_text(stops, "".join(pieces))


@settings(deadline=None, max_examples=100)
@given(stop_lists, st.text("abc", max_size=30))
def test_only_what_could_become_a_stop_is_held(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, character in enumerate(text, 1):
        shown += matcher.push(character)
        held = text[len(shown) : end]
        if matcher.matched is None and held:
            assert any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["aab"], "aaab", "a", "aab"),
        (["abab"], "aababab", "a", "abab"),
        (["bc", "abcd"], "xabcd", "x", "abcd"),
        (["bc", "abcd"], "xabce", "xa", "bc"),
        (["bc", "abcd"], "xabc", "xa", "bc"),
        (["ab", "abc"], "xabc", "x", "ab"),
        (["\n\n"], "line\nline\n\nrest", "line\nline", "\n\n"),
        (["。", "😀"], "好😀。", "好", "😀"),
        (["end"], "the en", "the en", None),
        (["end"], "end", "", "end"),
        ([], "text", "text", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_earliest_stop_wins(stops: list[str], text: str, shown: str, matched: str | None, size: int) -> None:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert run(stops, pieces) == (shown, matched)


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("one. two") == "one"
    assert matcher.push(" three") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "."


def test_flush_gives_the_held_text_once() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a st") == "a "
    assert matcher.flush() == "st"
    assert matcher.flush() == ""
    assert matcher.matched is None
