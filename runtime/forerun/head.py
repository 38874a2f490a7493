"""A trained draft head: one layer that reads the target's own features, so that a step costs next to nothing.

    tokens      t_0  t_1  t_2 ..  t_(n-2)  t_(n-1)      the last one is pending: the target has not read it
    features    g_0  g_1  g_2 ..  g_(n-2)               the target's, in a cache of its own beside its keys and values
    entry i     g_i with token i + 1, in slot i of the head's cache; behind it comes token i + 2

So entry n - 2 proposes the next token. Every further step of a round has no features of the target to read and takes
the head's own output of the step before in their place. Such entries are provisional: once their tokens are
committed, and the target has read them, they are computed again. What the cache holds for good is therefore the
same whatever was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun.cache import KeyValueCache
from forerun.draft import SteppingDraft
from forerun.engine import Backend, ElementType, Tensor
from forerun.estimates import Acceptance, SequenceAcceptance
from forerun.model import PREFILL_CHUNK, BoundShape, CachedModel, Shape
from forerun.row import Row, Verdict
from forerun.sampling import Sampler
from forerun.workspace import Memory, RoundTensors

STEP_PRIORS = (0.7, 0.65, 0.6, 0.55)
"""Acceptance that is expected of the first steps before anything is known, and of all that follow the last."""


@dataclass
class _Sequence:
    """A sequence of `tokens` committed tokens, of which the first `cached` entries are in the cache for good."""

    acceptance: SequenceAcceptance
    tokens: int
    cached: int = 0


class HeadDraft(SteppingDraft[_Sequence]):
    """Proposes by a head that reads `target`'s features; of up to `longest` proposals each has its own acceptance."""

    def __init__(
        self, model: CachedModel, target: CachedModel, sampler: Sampler, backend: Backend, *, longest: int
    ) -> None:
        super().__init__(model, sampler, backend)
        self._target = target
        self._longest = longest
        self._acceptance = Acceptance([STEP_PRIORS[min(step, len(STEP_PRIORS) - 1)] for step in range(longest)])
        self._memory, self._rows = Memory(backend), 0
        self._target_generation = 0

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """See `Draft.begin`."""
        self._sequences[row] = _Sequence(self._acceptance.sequence(), len(tokens))

    def outlook(self, row: int, most: int) -> Sequence[float]:
        """See `Draft.outlook`. Of a single token there are no features yet, and so no proposals."""
        sequence = self._sequences[row]
        return [sequence.acceptance.probability(step) for step in range(most if sequence.tokens > 1 else 0)]

    def prepare(self, row: int, tokens: Sequence[int], *, rows: int) -> None:
        """Compute the entries that the cache lacks, but for the last; see `Draft.prepare`."""
        sequence, wanted = self._sequences[row], len(tokens) - 2
        if sequence.cached < wanted:
            self.model.cache.reserve(rows, len(tokens))
            features = self._target.cache.features(row, 1)
            self._read(self.model, row, tokens, range(sequence.cached, wanted), features)
            sequence.cached = wanted

    def cached(self, row: int) -> int:
        """See `SteppingDraft.cached`: a slot for each entry, and an entry for each token but the first."""
        return self._sequences[row].cached if row in self._sequences else 0

    def reread(self, row: int, tokens: Sequence[int], slots: int) -> KeyValueCache:
        """See `SteppingDraft.reread`."""
        fresh = self.model.with_own_cache()
        fresh.cache.reserve(1, slots)
        self._read(fresh, 0, tokens, range(slots), self._target.cache.features(row, 1))
        return fresh.cache

    def _read(
        self, model: CachedModel, row: int, tokens: Sequence[int], entries: Sequence[int], features: Tensor
    ) -> None:
        """Put entries into a row of a model's cache, a chunk at a time, by the features [1,1,C,h] of the tokens."""
        allocate, write = self._backend.allocate, self._backend.write
        logits = allocate(ElementType.FLOAT, (1, 1, model.vocabulary_size))
        hidden = allocate(ElementType.FLOAT, (1, 1, 1, model.architecture.hidden_size))
        ids, feature_rows = (allocate(ElementType.INT64, (1, PREFILL_CHUNK)) for _ in range(2))
        for start in range(0, len(entries), PREFILL_CHUNK):
            chunk = entries[start : start + PREFILL_CHUNK]
            input_ids, rows = ids.view(1, len(chunk)), feature_rows.view(1, len(chunk))
            inputs, shape = {"features": features, "feature_rows": rows}, Shape(row, 1, len(chunk), 1)
            bound = model.bind_once(shape, input_ids, logits, inputs, {"hidden": hidden})
            write(input_ids, [tokens[entry + 1] for entry in chunk])
            write(rows, chunk)
            model.run(bound, [chunk[0]])

    def _start(self, rows: Sequence[Row], lengths: Sequence[int], tensors: RoundTensors) -> None:
        self._forget_moved()
        self._make_room(tensors.rows)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length and len(self._lacking(index, row)) > self._widest:
                self.prepare(index, row.tokens, rows=tensors.rows)
        longest = max(len(row.tokens) for row in rows)
        self.model.cache.reserve(tensors.rows, longest + max(self._widest, *lengths))

    def _forget_moved(self) -> None:
        """Bindings to the target's features are void once these have moved."""
        if self._target_generation != self._target.cache.generation:
            self.model.forget()
            self._target_generation = self._target.cache.generation

    def _make_room(self, rows: int) -> None:
        if rows > self._rows:
            self.model.forget()
            self._memory, self._rows = Memory(self._backend), rows

    def _step(self, rows: Sequence[Row], lengths: Sequence[int], tensors: RoundTensors, step: int) -> None:
        if step == 0:
            self._feed_committed(rows, lengths, tensors)
        else:
            self._feed_proposal(rows, tensors, step)

    def _feed_committed(self, rows: Sequence[Row], lengths: Sequence[int], tensors: RoundTensors) -> None:
        """The entries that the last tokens brought, S for each row: as many as one that is asked lacks at the most.

        Rows that lack fewer have padding behind theirs, in slots that hold nothing yet. The last entry is always
        among those of a row that is asked, because its logits are wanted; other rows catch up by S.
        """
        lacking = [self._lacking(index, row) for index, row in enumerate(rows)]
        width = max(len(entries) for entries, length in zip(lacking, lengths, strict=True) if length)
        fed = [entries[:width] for entries in lacking]
        input_ids, feature_rows = (self._integers(name, tensors.rows, width) for name in ("input_ids", "feature_rows"))
        padded = [[*entries, *[-1] * (width - len(entries))] for entries in fed]
        self._backend.write(feature_rows, [max(entry, 0) for entries in padded for entry in entries])
        committed = [
            row.tokens[entry + 1] if entry >= 0 else 0
            for row, entries in zip(rows, padded, strict=True)
            for entry in entries
        ]
        self._backend.write(input_ids, committed)
        features = self._target.cache.features(0, tensors.rows)
        bound = self._bind(tensors, width, 0, input_ids, {"features": features, "feature_rows": feature_rows})
        self._backend.write(bound.logit_rows, [max(len(entries) - 1, 0) for entries in fed])
        self.model.run(bound, [entries.start for entries in fed])
        for index, entries in enumerate(fed):
            if (sequence := self._sequences.get(index)) is not None:
                sequence.cached = max(sequence.cached, entries.stop)

    def _lacking(self, index: int, row: Row) -> range:
        """Entries to compute, the last one always among them; none of a row that this draft does not know."""
        sequence, after_last = self._sequences.get(index), len(row.tokens) - 1
        return range(max(min(sequence.cached, after_last - 1), 0), after_last) if sequence is not None else range(0)

    def _feed_proposal(self, rows: Sequence[Row], tensors: RoundTensors, step: int) -> None:
        """The entry of the last proposal, on the head's own output of the step before."""
        first = self._integers("first", tensors.rows, 1)  # zeros: the only one there is
        inputs = {"features": self._hidden(tensors.rows, step - 1), "feature_rows": first}
        bound = self._bind(tensors, 1, step, tensors.draft_token, inputs)
        self.model.run(bound, [len(row.tokens) - 2 + step for row in rows])

    def _bind(
        self, tensors: RoundTensors, width: int, step: int, input_ids: Tensor, inputs: Mapping[str, Tensor]
    ) -> BoundShape:
        return self.model.bind(
            Shape(0, tensors.rows, width, logit_rows=1),
            input_ids=input_ids,
            logits=tensors.draft.logits,
            inputs=inputs,
            outputs={"hidden": self._hidden(tensors.rows, step)},
        )

    @property
    def _widest(self) -> int:
        """The most entries of a row in a round's first call: those of a round that kept all its proposals."""
        return self._longest + 1

    def _integers(self, name: str, rows: int, columns: int) -> Tensor:
        return self._memory.view(name, ElementType.INT64, (rows, columns), (self._rows, self._widest))

    def _hidden(self, rows: int, step: int) -> Tensor:
        """The head's output [B,1,1,h] of a step: two tensors in turn, as each is read while the other is written."""
        size = self.model.architecture.hidden_size
        return self._memory.view(f"hidden.{step % 2}", ElementType.FLOAT, (rows, 1, 1, size), (self._rows, 1, 1, size))

    def timed_calls(self, tensors: Mapping[int, RoundTensors]) -> Mapping[int, Callable[[], None]]:
        """See `SteppingDraft.timed_calls`; a call of several entries has one row of logits."""
        own, allocate, size = self.model.with_own_cache(), self._backend.allocate, self.model.architecture.hidden_size
        own.cache.reserve(1, max(tensors) + 1)
        features = allocate(ElementType.FLOAT, (1, 1, own.cache.capacity, size))
        hidden = allocate(ElementType.FLOAT, (1, 1, 1, size))

        def call(width: int, each: RoundTensors) -> Callable[[], None]:
            inputs = {"features": features, "feature_rows": allocate(ElementType.INT64, (1, width))}
            shape = Shape(0, 1, width, logit_rows=1)
            bound = own.bind_once(shape, each.tokens, each.draft.logits, inputs, {"hidden": hidden})
            return lambda: own.run(bound, [0])

        return {width: call(width, each) for width, each in tensors.items()}

    def trim(self, rows: int, slots: int) -> None:
        """See `Draft.trim`."""
        super().trim(rows, slots)
        self._forget_moved()

    def release(self) -> None:
        """See `Draft.release`."""
        super().release()
        self._memory, self._rows = Memory(self._backend), 0

    def commit(self, row: int, tokens: Sequence[int], verdict: Verdict | None) -> None:
        """See `Draft.commit`."""
        sequence = self._sequences[row]
        sequence.tokens += len(tokens)
        if verdict is not None:
            sequence.acceptance.learn(range(len(verdict.proposals)), verdict.accepted)
