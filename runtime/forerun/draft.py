"""Draft strategies: whatever proposes tokens, behind four verbs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forerun.engine import Backend
from forerun.laws import Demands
from forerun.model import CachedModel, Shape
from forerun.randomness import Stream
from forerun.row import Row
from forerun.sampling import Sampler
from forerun.workspace import RoundTensors


class Draft(Protocol):
    """Proposes tokens for the rows of a batch. Rows are known by their index, 0 .. n-1."""

    @property
    def name(self) -> str:
        """What `Controls.draft` calls it."""

    def begin(self, row: int, tokens: Sequence[int], *, rows: int) -> None:
        """A sequence starts in row `row` with these committed tokens; the batch is about to have `rows` rows."""

    def propose(self, rows: Sequence[Row], demands: Demands, tensors: RoundTensors) -> None:
        """Fill columns 1..K of `tensors.tokens` with proposals and `tensors.q` with the laws they were drawn from."""

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Row `row` has emitted these tokens."""

    def end(self, row: int, last: int, *, clear: bool = False) -> None:
        """Row `row` has ended; the sequence of row `last` takes its place. `clear`: what it held may be no number."""

    def release(self) -> None:
        """No sequence is left: let go of memory."""


class ModelDraft:
    """A smaller decoder with a cache of its own.

    Each round starts by feeding the last *two* committed tokens: after a round that kept all K proposals the cache
    lacks the K-th, which no step has fed. Writing a slot again with the same token changes nothing, so what is
    cached follows from what is committed, and a rejected proposal needs no rollback.
    """

    name = "model"

    def __init__(self, model: CachedModel, sampler: Sampler, backend: Backend) -> None:
        self.model = model
        self._sampler = sampler
        self._backend = backend

    def begin(self, row: int, tokens: Sequence[int], *, rows: int) -> None:
        """Read the prompt; see `Draft.begin`."""
        self.model.cache.reserve(rows, len(tokens))
        self.model.prefill(row, tokens[:-1])

    def propose(self, rows: Sequence[Row], demands: Demands, tensors: RoundTensors) -> None:
        """K steps of the model, each followed by a draw; see `Draft.propose`."""
        longest = max(len(row.tokens) for row in rows)
        self.model.cache.reserve(tensors.rows, longest + tensors.draft_length)
        drafted: list[list[int]] = [[] for _ in rows]
        for step in range(tensors.draft_length):
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

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Nothing to do: the next round feeds what it needs."""

    def end(self, row: int, last: int, *, clear: bool = False) -> None:
        """See `Draft.end`."""
        self.model.cache.end(row, last, clear=clear)

    def release(self) -> None:
        """See `Draft.release`."""
        self.model.release()
