"""Where a growing sequence has been before: a suffix automaton, extended token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

COUNTED_SUFFIXES = 32
"""Suffixes whose occurrences are counted for a token. A text that repeats itself has as many as tokens."""


@dataclass(frozen=True, slots=True)
class Step:
    """A token that may come next.

    `matched` is how many tokens before it have occurred together earlier; `unanimous` whether whatever followed them
    there was this token.
    """

    token: int
    matched: int
    unanimous: bool


class SuffixAutomaton:
    """All substrings of a sequence, each known by where it ends (Blumer et al. 1985, Theoretical Computer Science 40).

    A state stands for the substrings that end at the same places; its *link* leads to the longest suffix of them that
    ends at more places. So the link of the whole sequence is its longest suffix that occurred earlier. A token costs
    amortised constant time and at most two states.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # transitions of each state; state 0 is the empty string
        self._link = [-1]
        self._longest = [0]  # length of a state's longest substring
        self._count = [0]  # how often it ends in the sequence, the last time included
        self._latest = [0]  # where it ended last
        self._whole = 0  # the state of the whole sequence

    def append(self, token: int) -> None:
        """One token more."""
        length = self._longest[self._whole] + 1
        state, whole = self._whole, self._state({}, length=length, count=1)
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = whole
            state = self._link[state]
        self._link[whole] = 0 if state < 0 else self._ending_at(state, token)
        self._whole = whole
        self._count_suffixes(length)

    def _ending_at(self, state: int, token: int) -> int:
        """The state whose longest substring is that of `state` and then `token`; split off where there is none."""
        following = self._next[state][token]
        length = self._longest[state] + 1
        if self._longest[following] == length:
            return following
        split = self._state(dict(self._next[following]), length=length, count=self._count[following])
        self._link[split], self._link[following] = self._link[following], split
        while state >= 0 and self._next[state].get(token) == following:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _state(self, transitions: dict[int, int], *, length: int, count: int) -> int:
        self._next.append(transitions)
        self._link.append(0)
        self._longest.append(length)
        self._count.append(count)
        self._latest.append(length)
        return len(self._next) - 1

    def _count_suffixes(self, end: int) -> None:
        state = self._link[self._whole]
        for _ in range(COUNTED_SUFFIXES):
            if state <= 0:
                break
            self._count[state] += 1
            self._latest[state] = end
            state = self._link[state]

    def continuation(self) -> Iterator[Step]:
        """What comes next if the sequence goes on as it did before: the most frequent token each time, then the latest.

        Ends where nothing has followed yet; from there a shorter suffix leads on, so that what repeats goes on
        repeating.
        """
        state = self._link[self._whole]
        matched = self._longest[max(state, 0)]
        while state > 0:
            if not self._next[state]:
                state = self._link[state]
                matched = self._longest[state]
                continue
            following = self._next[state]
            token, state = max(following.items(), key=lambda item: (self._count[item[1]], self._latest[item[1]]))
            yield Step(token, matched, unanimous=len(following) == 1)
            matched += 1
