"""Draft strategies: whatever proposes tokens, behind the same verbs."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from forerun.cache import KeyValueCache
from forerun.engine import Backend
from forerun.estimates import Acceptance, SequenceAcceptance
from forerun.laws import Demands
from forerun.model import CachedModel, Shape
from forerun.profiling import model_calls
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


class SteppingDraft(abc.ABC, Generic[T]):
    """A draft that makes one proposal at a step, for all rows of the batch in lockstep: each is drawn from a law q.

    `model` is what gives the logits, with a cache of its own; T is what is kept of each sequence.
    """

    name = "model"
    points = False

    def __init__(self, model: CachedModel, sampler: Sampler, backend: Backend) -> None:
        self.model = model
        self._sampler = sampler
        self._backend = backend
        self._sequences: dict[int, T] = {}

    @abc.abstractmethod
    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """See `Draft.begin`."""

    @abc.abstractmethod
    def prepare(self, row: int, tokens: Sequence[int], *, rows: int) -> None:
        """See `Draft.prepare`."""

    @abc.abstractmethod
    def outlook(self, row: int, most: int) -> Sequence[float]:
        """See `Draft.outlook`."""

    @abc.abstractmethod
    def commit(self, row: int, tokens: Sequence[int], verdict: Verdict | None) -> None:
        """See `Draft.commit`."""

    @abc.abstractmethod
    def cached(self, row: int) -> int:
        """How many of a row's slots hold what follows from its committed tokens."""

    @abc.abstractmethod
    def reread(self, row: int, tokens: Sequence[int], slots: int) -> KeyValueCache:
        """A fresh cache of one row: its first `slots` slots are those of row `row`, whose tokens these are."""

    @abc.abstractmethod
    def timed_calls(self, tensors: Mapping[int, RoundTensors]) -> Mapping[int, Callable[[], None]]:
        """Calls of the model to be timed, by their number of tokens; each has the tensors of one row."""

    @abc.abstractmethod
    def _start(self, rows: Sequence[Row], lengths: Sequence[int], tensors: RoundTensors) -> None:
        """Make room for a round and catch up, so that the first step can follow."""

    @abc.abstractmethod
    def _step(self, rows: Sequence[Row], lengths: Sequence[int], tensors: RoundTensors, step: int) -> None:
        """Feed what comes before proposal number `step`: its logits, into `tensors.draft`."""

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], demands: Demands, tensors: RoundTensors) -> None:
        """max(lengths) steps, each followed by a draw; see `Draft.propose`."""
        self._start(rows, lengths, tensors)
        drafted: list[list[int]] = [[] for _ in rows]
        for step in range(max(lengths)):
            self._step(rows, lengths, tensors, step)
            self._write_draw(rows, demands, tensors, step)
            places = [row.edits_at(drafted[index]) for index, row in enumerate(rows)] if demands.edits else None
            shaped = self._sampler.shape(tensors.draft, tensors, demands, places)
            self._sampler.propose(shaped, tensors, demands)
            if demands.edits:  # what is edited next depends on what was drafted
                for tokens, token in zip(drafted, self._backend.read(tensors.draft_token), strict=True):
                    tokens.append(token)

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

    def _write_draw(self, rows: Sequence[Row], demands: Demands, tensors: RoundTensors, step: int) -> None:
        write = self._backend.write
        write(tensors.step, [step] * len(rows))
        if demands.samples:
            places = [len(row.tokens) + step for row in rows]
            write(tensors.draft.positions, places)
            drawn = [row.uniforms(Stream.DRAFT, place, step, 2) for row, place in zip(rows, places, strict=True)]
            write(tensors.propose_uniforms, [number for pair in drawn for number in pair])


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


class ModelDraft(SteppingDraft[_Sequence]):
    """A smaller decoder with a cache of its own.

    Each round starts by feeding the last *two* committed tokens: after a round that kept all K proposals the cache
    lacks the K-th, which no step has fed. Writing a slot again with the same token changes nothing, so a rejected
    proposal needs no rollback. Rows that were not asked fall behind, and catch up when they are.
    """

    def __init__(self, model: CachedModel, sampler: Sampler, backend: Backend) -> None:
        super().__init__(model, sampler, backend)
        self._acceptance = Acceptance([MODEL_PRIOR])

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """See `Draft.begin`."""
        self._sequences[row] = _Sequence(self._acceptance.sequence())

    def cached(self, row: int) -> int:
        """See `SteppingDraft.cached`: a slot for each committed token."""
        return self._sequences[row].cached if row in self._sequences else 0

    def reread(self, row: int, tokens: Sequence[int], slots: int) -> KeyValueCache:
        """See `SteppingDraft.reread`."""
        return self.model.reread(tokens[:slots])

    def timed_calls(self, tensors: Mapping[int, RoundTensors]) -> Mapping[int, Callable[[], None]]:
        """See `SteppingDraft.timed_calls`."""
        return model_calls(self.model, tensors)

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
        """See `Draft.propose`."""
        super().propose(rows, lengths, demands, tensors)
        self._remember_fed(rows, max(lengths))

    def _start(self, rows: Sequence[Row], lengths: Sequence[int], tensors: RoundTensors) -> None:
        self.model.cache.reserve(tensors.rows, max(len(row.tokens) for row in rows) + max(lengths))
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length:
                self.prepare(index, row.tokens, rows=tensors.rows)

    def _step(self, rows: Sequence[Row], lengths: Sequence[int], tensors: RoundTensors, step: int) -> None:
        if step == 0:
            self._feed_last_two(rows, tensors)
        else:
            self._feed_proposal(rows, tensors, step)

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

    def commit(self, row: int, tokens: Sequence[int], verdict: Verdict | None) -> None:
        """See `Draft.commit`."""
        sequence = self._sequences[row]
        if sequence.fed:
            accepted = 0 if verdict is None else verdict.accepted
            sequence.cached = sequence.fed + min(accepted, sequence.fed_proposals)
            sequence.fed = 0
        if verdict is not None:
            sequence.acceptance.learn([0] * len(verdict.proposals), verdict.accepted)


def end_row(states: dict[int, T], row: int, last: int) -> None:
    """Row `row` has ended: what is kept by row of row `last`, if anything is, takes its place."""
    states.pop(row, None)
    if row != last and last in states:
        states[row] = states.pop(last)
