"""One round of speculative decoding: propose, verify, accept. (Rows commit: `row.py`.)

    committed tokens        t_1 ... t_(n-1)  t_n            t_n is pending: not yet in the target's cache
    proposals                                     x_1 ... x_K
    the target sees                          t_n  x_1 ... x_K        written from slot n - 1 on
    its logits judge                              x_1 ... x_K  and give the token after the last one kept

Tokens, logits and q stay in device tensors from the first draft step to the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.draft import Draft
from forerun.engine import Backend
from forerun.laws import Law, SamplingGraphs, common_law
from forerun.model import CachedModel, Shape
from forerun.randomness import Stream
from forerun.row import Row, Verdict
from forerun.workspace import RoundTensors, Workspace


class Loop:
    """Rounds for a batch of rows, in lockstep; each row at its own length and with its own controls."""

    def __init__(
        self,
        backend: Backend,
        target: CachedModel,
        draft: Draft | None,
        sampling: SamplingGraphs,
        *,
        draft_length: int,
    ) -> None:
        self.backend = backend
        self.target = target
        self.draft = draft
        self.sampling = sampling
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
        law = common_law(row.controls.law_name for row in rows)
        tensors = self._tensors(len(rows), max(valid))
        self._write_inputs(rows, valid, law, tensors)
        if self.draft is not None and max(valid) > 0:
            self.draft.propose(rows, law, tensors)
        self._verify(rows, tensors)
        return self._accept(valid, law, tensors)

    def _verify(self, rows: Sequence[Row], tensors: RoundTensors) -> None:
        count, tokens = tensors.tokens.shape
        longest = max(len(row.tokens) for row in rows)
        self.target.cache.reserve(count, longest - 1 + tokens)
        bound = self.target.bind(
            Shape(0, count, tokens, tokens), input_ids=tensors.tokens, logits=tensors.logits
        )
        self.target.run(bound, [len(row.tokens) - 1 for row in rows])

    def _accept(self, valid: Sequence[int], law: Law, tensors: RoundTensors) -> list[Verdict]:
        read, width = self.backend.read, tensors.tokens.shape[1]
        if width == 1:
            self.sampling.draw(law, tensors)()
            return [Verdict((), 0, token) for token in read(tensors.next_token)]
        self.sampling.verify(law, tensors)()
        tokens, accepted, following = read(tensors.tokens), read(tensors.accepted), read(tensors.next_token)
        return [
            Verdict(tokens[index * width + 1 : index * width + 1 + count], accepted[index], following[index])
            for index, count in enumerate(valid)
        ]

    def commit(self, index: int, tokens: Sequence[int]) -> None:
        """Row `index` has emitted these tokens."""
        if self.draft is not None:
            self.draft.commit(index, tokens)

    def end(self, index: int, last: int) -> None:
        """Row `index` has ended; the sequence of row `last` takes its place."""
        if index != last:
            self.target.cache.move(last, index)
        if self.draft is not None:
            self.draft.end(index, last)

    def _tensors(self, rows: int, draft_length: int) -> RoundTensors:
        if self._workspace is None or self._workspace.rows < rows:
            self.sampling.forget()
            self._workspace = Workspace(
                self.backend,
                rows=rows,
                draft_length=max(1, self.draft_length),
                vocabulary_size=self.target.vocabulary_size,
            )
        return self._workspace.tensors(rows, draft_length)

    def _write_inputs(
        self, rows: Sequence[Row], valid: Sequence[int], law: Law, tensors: RoundTensors
    ) -> None:
        write, draft_length = self.backend.write, tensors.tokens.shape[1] - 1
        padding = [0] * draft_length
        write(tensors.tokens, [token for row in rows for token in (row.tokens[-1], *padding)])
        write(tensors.valid, valid)
        if law.samples:
            write(tensors.temperature, [row.controls.temperature for row in rows])
            write(
                tensors.draw_uniforms,
                [u for row in rows for u in row.uniforms(Stream.DRAW, len(row.tokens), 0, 2)],
            )
            if draft_length:
                write(
                    tensors.accept_uniforms, [u for row in rows for u in _accept_uniforms(row, draft_length)]
                )


def _accept_uniforms(row: Row, draft_length: int) -> list[float]:
    start = len(row.tokens)
    return [row.uniforms(Stream.ACCEPT, start + step, step, 1)[0] for step in range(draft_length)]
