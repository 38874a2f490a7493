"""Draft strategies: whatever proposes tokens, behind the same verbs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from forerun.engine import Backend
from forerun.estimates import Acceptance, SequenceAcceptance
from forerun.laws import Demands
from forerun.model import CachedModel, Shape
from forerun.randomness import Stream
from forerun.row import Row, Verdict
from forerun.sampling import Sampler
from forerun.workspace import RoundTensors

T = TypeVar("T")


class Draft(Protocol):
    """Proposes tokens for the rows of a batch. Rows are known by their index, 0 .. n-1.

    `points`: its proposals are not drawn, so that q is 1 at each of them.
    """

    @property
    def name(self) -> str:
        """What `Controls.draft` calls it."""

    @property
    def points(self) -> bool:
        """See above."""

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """A sequence with these committed tokens starts in row `row`."""

    def prepare(self, row: int, tokens: Sequence[int], *, rows: int) -> None:
        """Row `row` is about to be asked for the first time, in a batch of up to `rows` rows: read its tokens now."""

    def outlook(self, row: int, most: int) -> Sequence[float]:
        """For each of up to `most` proposals: the probability that it is accepted, given that those before it are."""

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], demands: Demands, tensors: RoundTensors) -> None:
        """Fill columns 1..K of `tensors.tokens` with proposals, and `tensors.q` with the laws they were drawn from.

        `lengths` has each row's K. Rows with K = 0 ask for nothing, but what is in their columns may change.
        """

    def commit(self, row: int, tokens: Sequence[int], verdict: Verdict | None) -> None:
        """Row `row` has emitted these tokens; `verdict` is that on this draft's proposals, if it was asked."""

    def end(self, row: int, last: int, *, clear: bool = False) -> None:
        """Row `row` has ended; the sequence of row `last` takes its place. `clear`: what it held may be no number."""

    def trim(self, rows: int, slots: int) -> None:
        """The batch has `rows` rows of up to `slots` tokens: give back memory beyond that."""

    def release(self) -> None:
        """No sequence is left: let go of memory."""


MODEL_PRIOR = 0.75
"""Acceptance that is expected of a draft model before anything is known."""


@dataclass
class _Sequence:
    """What the draft's cache holds of a sequence: its first `cached` committed tokens.

    In a round, `fed` of its committed tokens and then `fed_proposals` proposals have gone in.
    """

    acceptance: SequenceAcceptance
    cached: int = 0
    fed: int = 0
    fed_proposals: int = 0


class ModelDraft:
    """A smaller decoder with a cache of its own.

    Each round starts by feeding the last *two* committed tokens: after a round that kept all K proposals the cache
    lacks the K-th, which no step has fed. Writing a slot again with the same token changes nothing, so a rejected
    proposal needs no rollback. Rows that were not asked fall behind, and catch up when they are.
    """

    name = "model"
    points = False

    def __init__(self, model: CachedModel, sampler: Sampler, backend: Backend) -> None:
        self.model = model
        self._sampler = sampler
        self._backend = backend
        self._acceptance = Acceptance([MODEL_PRIOR])
        self._sequences: dict[int, _Sequence] = {}

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """See `Draft.begin`."""
        self._sequences[row] = _Sequence(self._acceptance.sequence())

    def cached(self, row: int) -> int:
        """How many of a row's committed tokens the cache holds."""
        return self._sequences[row].cached if row in self._sequences else 0

    def outlook(self, row: int, most: int) -> Sequence[float]:
        """See `Draft.outlook`."""
        return [self._sequences[row].acceptance.probability(0)] * most

    def prepare(self, row: int, tokens: Sequence[int], *, rows: int) -> None:
        """Read what the cache lacks, but for the last two; see `Draft.prepare`."""
        sequence, wanted = self._sequences[row], len(tokens) - 2
        if sequence.cached < wanted:
            self.model.cache.reserve(rows, len(tokens))
            self.model.prefill(row, tokens[sequence.cached : wanted], cached=sequence.cached)
            sequence.cached = wanted

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], demands: Demands, tensors: RoundTensors) -> None:
        """max(lengths) steps of the model, each followed by a draw; see `Draft.propose`."""
        steps = max(lengths)
        self.model.cache.reserve(tensors.rows, max(len(row.tokens) for row in rows) + steps)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length:
                self.prepare(index, row.tokens, rows=tensors.rows)
        drafted: list[list[int]] = [[] for _ in rows]
        for step in range(steps):
            if step == 0:
                self._feed_last_two(rows, tensors)
            else:
                self._feed_proposal(rows, tensors, step)
            self._write_draw(rows, demands, tensors, step)
            places = [row.edits_at(drafted[index]) for index, row in enumerate(rows)] if demands.edits else None
            shaped = self._sampler.shape(tensors.draft, tensors, demands, places)
            self._sampler.propose(shaped, tensors, demands)
            if demands.edits:  # what is edited next depends on what was drafted
                for tokens, token in zip(drafted, self._backend.read(tensors.draft_token), strict=True):
                    tokens.append(token)
        self._remember_fed(rows, steps)

    def _remember_fed(self, rows: Sequence[Row], steps: int) -> None:
        """Of rows that had fallen behind and were not asked, nothing in the cache has become right."""
        for index, row in enumerate(rows):
            sequence = self._sequences.get(index)
            if sequence is not None and sequence.cached >= len(row.tokens) - 2:
                sequence.fed, sequence.fed_proposals = len(row.tokens), steps - 1

    def _feed_last_two(self, rows: Sequence[Row], tensors: RoundTensors) -> None:
        shape = Shape(0, tensors.rows, tokens=2, logit_rows=1)
        bound = self.model.bind(shape, input_ids=tensors.last_two, logits=tensors.draft.logits)
        last_two: list[int] = []
        for row in rows:  # a sequence of one token stands in front, and its padding is overwritten by the next step
            last_two += row.tokens[-2:] if len(row.tokens) > 1 else [row.tokens[0], 0]
        self._backend.write(tensors.last_two, last_two)
        self._backend.write(bound.logit_rows, [min(len(row.tokens), 2) - 1 for row in rows])
        self.model.run(bound, [max(len(row.tokens) - 2, 0) for row in rows])

    def _feed_proposal(self, rows: Sequence[Row], tensors: RoundTensors, step: int) -> None:
        shape = Shape(0, tensors.rows, tokens=1, logit_rows=1)
        bound = self.model.bind(shape, input_ids=tensors.draft_token, logits=tensors.draft.logits)
        self.model.run(bound, [len(row.tokens) - 1 + step for row in rows])

    def _write_draw(self, rows: Sequence[Row], demands: Demands, tensors: RoundTensors, step: int) -> None:
        write = self._backend.write
        write(tensors.step, [step] * len(rows))
        if demands.samples:
            places = [len(row.tokens) + step for row in rows]
            write(tensors.draft.positions, places)
            drawn = [row.uniforms(Stream.DRAFT, place, step, 2) for row, place in zip(rows, places, strict=True)]
            write(tensors.propose_uniforms, [number for pair in drawn for number in pair])

    def commit(self, row: int, tokens: Sequence[int], verdict: Verdict | None) -> None:
        """See `Draft.commit`."""
        sequence = self._sequences[row]
        if sequence.fed:
            accepted = 0 if verdict is None else verdict.accepted
            sequence.cached = sequence.fed + min(accepted, sequence.fed_proposals)
            sequence.fed = 0
        if verdict is not None:
            sequence.acceptance.learn([0] * len(verdict.proposals), verdict.accepted)

    def end(self, row: int, last: int, *, clear: bool = False) -> None:
        """See `Draft.end`."""
        self.model.cache.end(row, last, clear=clear)
        end_row(self._sequences, row, last)

    def trim(self, rows: int, slots: int) -> None:
        """See `Draft.trim`."""
        self.model.trim(rows, slots)

    def release(self) -> None:
        """See `Draft.release`."""
        self.model.release()
        self._sequences.clear()


def end_row(states: dict[int, T], row: int, last: int) -> None:
    """Row `row` has ended: what is kept by row of row `last`, if anything is, takes its place."""
    states.pop(row, None)
    if row != last and last in states:
        states[row] = states.pop(last)
