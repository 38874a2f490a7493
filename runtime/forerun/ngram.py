"""Drafts from the text itself: the tokens that followed when the sequence last went as it goes now."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.draft import end_row
from forerun.engine import Backend
from forerun.estimates import Acceptance, SequenceAcceptance
from forerun.laws import Demands
from forerun.row import Row, Verdict
from forerun.suffixes import Step, SuffixAutomaton
from forerun.workspace import RoundTensors

MATCH_PRIORS = {1: 0.1, 2: 0.25, 3: 0.4, 4: 0.5, 6: 0.65, 9: 0.8, 16: 0.9}
"""Acceptance that is expected behind a match of at least so many tokens, before anything is known."""
DIVIDED = 0.6
"""Factor of that where the match was followed by other tokens too."""

_LENGTHS = tuple(MATCH_PRIORS)


@dataclass
class _Sequence:
    acceptance: SequenceAcceptance
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    steps: list[Step] = field(default_factory=list)  # of the last outlook


class NgramDraft:
    """Proposes the continuation of the longest earlier match of a sequence's end, in its prompt and its output.

    As in prompt lookup and SAM-Decoding (2411.10666). Acceptance is learnt by the length of the match and by whether
    it was always followed by the same token.
    """

    name = "ngram"
    points = True

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        priors = MATCH_PRIORS.values()
        self._acceptance = Acceptance([*priors, *(DIVIDED * prior for prior in priors)])
        self._sequences: dict[int, _Sequence] = {}

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """See `Draft.begin`."""
        sequence = self._sequences[row] = _Sequence(self._acceptance.sequence())
        for token in tokens:
            sequence.automaton.append(token)

    def prepare(self, row: int, tokens: Sequence[int], *, rows: int) -> None:
        """Nothing to do: matches are known from the start."""

    def outlook(self, row: int, most: int) -> Sequence[float]:
        """See `Draft.outlook`; shorter than `most` where no match goes on."""
        sequence = self._sequences[row]
        sequence.steps = list(itertools.islice(sequence.automaton.continuation(), most))
        return [sequence.acceptance.probability(_kind(step)) for step in sequence.steps]

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], demands: Demands, tensors: RoundTensors) -> None:
        """Write what the last outlooks found; see `Draft.propose`."""
        width = tensors.draft_length + 1
        if all(lengths):
            columns = [token for row in rows for token in (row.tokens[-1], *[0] * tensors.draft_length)]
        else:  # another draft may have proposed for the rest
            columns = self._backend.read(tensors.tokens)
        for index, length in enumerate(lengths):
            found = [step.token for step in self._sequences[index].steps[:length]] if length else []
            columns[index * width + 1 : index * width + 1 + length] = found
        self._backend.write(tensors.tokens, columns)

    def commit(self, row: int, tokens: Sequence[int], verdict: Verdict | None) -> None:
        """See `Draft.commit`."""
        sequence = self._sequences[row]
        if verdict is not None:
            kinds = [_kind(step) for step in sequence.steps[: len(verdict.proposals)]]
            sequence.acceptance.learn(kinds, verdict.accepted)
        for token in tokens:
            sequence.automaton.append(token)

    def end(self, row: int, last: int, *, clear: bool = False) -> None:
        """See `Draft.end`."""
        end_row(self._sequences, row, last)

    def trim(self, rows: int, slots: int) -> None:
        """Nothing to do: what a row knows goes with it."""

    def release(self) -> None:
        """See `Draft.release`."""
        self._sequences.clear()


def _kind(step: Step) -> int:
    """Number of a step's kind: by its match's length, matches with one continuation first."""
    longest = max(number for number, length in enumerate(_LENGTHS) if length <= step.matched)
    return longest if step.unanimous else longest + len(_LENGTHS)
