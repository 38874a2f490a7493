"""One round of speculative decoding: propose, verify, accept. (Rows commit: `row.py`.)

    committed tokens        t_1 ... t_(n-1)  t_n            t_n is pending: not yet in the target's cache
    proposals                                     x_1 ... x_K
    the target sees                          t_n  x_1 ... x_K        written from slot n - 1 on
    its logits judge                              x_1 ... x_K  and give the token after the last one kept

Tokens, logits, p and q stay in device tensors from the first draft step to the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.draft import Draft
from forerun.edits import NO_EDITS, PlaceEdits
from forerun.engine import Backend
from forerun.laws import Demands
from forerun.logprobs import read_logprobs
from forerun.model import CachedModel, Shape
from forerun.randomness import Stream
from forerun.row import Row, Verdict
from forerun.sampling import Sampler, Shaped
from forerun.workspace import RoundTensors, Workspace


class Loop:
    """Rounds for a batch of rows, in lockstep; each row at its own length and with its own controls."""

    def __init__(
        self,
        backend: Backend,
        target: CachedModel,
        draft: Draft | None,
        sampler: Sampler,
        *,
        draft_length: int,
    ) -> None:
        self.backend = backend
        self.target = target
        self.draft = draft
        self.sampler = sampler
        self.draft_length = draft_length  # the largest K
        self._workspace: Workspace | None = None

    def begin(self, index: int, row: Row, *, rows: int) -> None:
        """Read the row's prompt, all but its last token: that one is pending.

        `rows` is the number of rows that the batch is about to have.
        """
        self.target.cache.reserve(rows, len(row.tokens))
        self.target.prefill(index, row.tokens[:-1])
        if self.draft is not None and row.draft_length > 0:
            self.draft.begin(index, row.tokens, rows=rows)

    def round(self, rows: Sequence[Row]) -> list[Verdict]:
        """One round for rows 0 .. n-1 of the batch: what each of them is to commit."""
        valid = [row.proposals_wanted() for row in rows]
        demands = Demands.of(rows)
        tensors = self._tensors(len(rows), max(valid))
        self._write_inputs(rows, valid, demands, tensors)
        if self.draft is not None and max(valid) > 0:
            self.draft.propose(rows, demands, tensors)
        self._verify(rows, tensors)
        return self._accept(rows, valid, demands, tensors)

    def _verify(self, rows: Sequence[Row], tensors: RoundTensors) -> None:
        """The target's logits behind the pending token and behind every proposal."""
        tokens = tensors.draft_length + 1
        longest = max(len(row.tokens) for row in rows)
        self.target.cache.reserve(tensors.rows, longest - 1 + tokens)
        shape = Shape(0, tensors.rows, tokens, logit_rows=tokens)
        bound = self.target.bind(shape, input_ids=tensors.tokens, logits=tensors.target.logits)
        self.target.run(bound, [len(row.tokens) - 1 for row in rows])

    def _accept(
        self, rows: Sequence[Row], valid: Sequence[int], demands: Demands, tensors: RoundTensors
    ) -> list[Verdict]:
        width = tensors.draft_length + 1
        tokens = self.backend.read(tensors.tokens) if tensors.draft_length else []
        proposals = [tokens[index * width + 1 : index * width + 1 + count] for index, count in enumerate(valid)]
        places = _places(rows, proposals, width) if demands.edits else None
        shaped = self.sampler.shape(tensors.target, tensors, demands, places)
        verdicts = self._verdicts(rows, proposals, demands, tensors, shaped)
        if demands.logprobs:
            return read_logprobs(self.backend, self.sampler, shaped, tensors, demands, rows, verdicts)
        return verdicts

    def _verdicts(
        self,
        rows: Sequence[Row],
        proposals: Sequence[Sequence[int]],
        demands: Demands,
        tensors: RoundTensors,
        shaped: Shaped,
    ) -> list[Verdict]:
        """Each row's verdict under its own law; a batch with several laws asks each of them."""
        read = self.backend.read
        if tensors.draft_length == 0:
            self.sampler.draw(shaped, tensors, demands)
            return [Verdict((), 0, token) for token in read(tensors.next_token)]
        verdicts: dict[int, Verdict] = {}
        for law in demands.laws:
            self.sampler.verify(shaped, tensors, law)
            accepted, following = read(tensors.accepted), read(tensors.next_token)
            for index, row in enumerate(rows):
                if demands.law_of(row) is law:
                    verdicts[index] = Verdict(proposals[index], accepted[index], following[index])
        return [verdicts[index] for index in range(len(rows))]

    def commit(self, index: int, tokens: Sequence[int]) -> None:
        """Row `index` has emitted these tokens."""
        if self.draft is not None:
            self.draft.commit(index, tokens)

    def end(self, index: int, last: int, *, clear: bool = False) -> None:
        """Row `index` has ended; the sequence of row `last` takes its place. `clear`: see `KeyValueCache.end`."""
        self.target.cache.end(index, last, clear=clear)
        if self.draft is not None:
            self.draft.end(index, last, clear=clear)

    def release(self) -> None:
        """Let go of caches and working memory; the next sequence takes new ones."""
        self.target.release()
        if self.draft is not None:
            self.draft.release()
        self.sampler.forget()
        self._workspace = None

    def _tensors(self, rows: int, draft_length: int) -> RoundTensors:
        if self._workspace is None or self._workspace.rows < rows:
            self.sampler.forget()
            self._workspace = Workspace(
                self.backend,
                rows=rows,
                draft_length=self.draft_length,
                vocabulary_size=self.target.vocabulary_size,
            )
        return self._workspace.tensors(rows, draft_length)

    def _write_inputs(self, rows: Sequence[Row], valid: Sequence[int], demands: Demands, tensors: RoundTensors) -> None:
        write, padding = self.backend.write, [0] * tensors.draft_length
        write(tensors.tokens, [token for row in rows for token in (row.tokens[-1], *padding)])
        write(tensors.valid, valid)
        write(tensors.temperature, [row.controls.temperature for row in rows])
        if demands.samples:
            self._write_randomness(rows, demands, tensors)
        if demands.filters:
            write(tensors.top_k, [row.controls.top_k for row in rows])
            write(tensors.top_p, [row.controls.top_p for row in rows])
            write(tensors.min_p, [row.controls.min_p for row in rows])

    def _write_randomness(self, rows: Sequence[Row], demands: Demands, tensors: RoundTensors) -> None:
        write, steps = self.backend.write, range(tensors.draft_length)
        write(tensors.coupled, [demands.law_of(row).coupled for row in rows])
        write(tensors.noise_keys, [key for row in rows for key in row.noise_keys])
        write(
            tensors.target.positions,
            [len(row.tokens) + step for row in rows for step in (*steps, len(steps))],
        )
        write(
            tensors.draw_uniforms,
            [u for row in rows for u in row.uniforms(Stream.DRAW, len(row.tokens), 0, 2)],
        )
        if steps:
            write(
                tensors.accept_uniforms,
                [row.uniforms(Stream.ACCEPT, len(row.tokens) + step, step, 1)[0] for row in rows for step in steps],
            )


def _places(rows: Sequence[Row], proposals: Sequence[Sequence[int]], width: int) -> list[PlaceEdits]:
    """The edits of every place that the target judges; those behind a row's last proposal do not matter."""
    return [
        row.edits_at(drafted[:place]) if place <= len(drafted) else NO_EDITS
        for row, drafted in zip(rows, proposals, strict=True)
        for place in range(width)
    ]
