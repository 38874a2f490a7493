"""One round of speculative decoding: propose, verify, accept. (Rows commit: `row.py`.)

    committed tokens        t_1 ... t_(n-1)  t_n            t_n is pending: not yet in the target's cache
    proposals                                     x_1 ... x_K
    the target sees                          t_n  x_1 ... x_K        written from slot n - 1 on
    its logits judge                              x_1 ... x_K  and give the token after the last one kept

Tokens, logits, p and q stay in device tensors from the first draft step to the verdict.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from forerun.draft import Draft
from forerun.edits import NO_EDITS, PlaceEdits
from forerun.engine import Backend
from forerun.errors import BackendError
from forerun.laws import Demands
from forerun.logprobs import read_logprobs
from forerun.model import CachedModel, Shape
from forerun.planning import Choice, Planner
from forerun.randomness import Stream
from forerun.row import Row, Verdict
from forerun.sampling import Sampler, Shaped
from forerun.workspace import RoundTensors, Workspace


class Loop:
    """Rounds for a batch of rows, in lockstep; each row at its own length and with its own controls.

    `drafts` propose in their order. One whose steps write into every row's columns comes before one that only fills
    in its own rows.
    """

    def __init__(
        self,
        backend: Backend,
        target: CachedModel,
        drafts: Mapping[str, Draft],
        sampler: Sampler,
        planner: Planner,
        *,
        draft_length: int,
    ) -> None:
        self.backend = backend
        self.target = target
        self.drafts = drafts
        self.sampler = sampler
        self.planner = planner
        self.draft_length = draft_length  # the largest K
        self._workspace: Workspace | None = None

    def begin(self, index: int, row: Row, *, rows: int) -> None:
        """Read the row's prompt, all but its last token: that one is pending.

        `rows` is the number of rows to have room for.
        """
        self.target.cache.reserve(rows, len(row.tokens))
        self.target.prefill(index, row.tokens[:-1])
        for name in row.drafts:
            self.drafts[name].begin(index, row.tokens)
        (choice,) = self.planner.plan({index: row}).choices
        if choice.draft is not None:
            self.drafts[choice.draft].prepare(index, row.tokens, rows=rows)

    def round(self, rows: Sequence[Row]) -> list[Verdict]:
        """One round for rows 0 .. n-1 of the batch: what each of them is to commit."""
        started = time.perf_counter()
        plan = self.planner.plan(dict(enumerate(rows)))
        demands = Demands.of(rows)
        tensors = self._tensors(len(rows), plan.width)
        self._write_inputs(rows, plan.lengths(), demands, tensors)
        for name, draft in self.drafts.items():  # in an order that matters: see `Loop`
            if any(lengths := plan.lengths(name)):
                draft.propose(rows, lengths, demands, tensors)
        self._verify(rows, tensors)
        verdicts = self._accept(rows, plan.choices, demands, tensors)
        self.planner.observe(rows, plan, time.perf_counter() - started)
        return verdicts

    def _verify(self, rows: Sequence[Row], tensors: RoundTensors) -> None:
        """The target's logits behind the pending token and behind every proposal."""
        tokens = tensors.draft_length + 1
        longest = max(len(row.tokens) for row in rows)
        self.target.cache.reserve(tensors.rows, longest - 1 + tokens)
        shape = Shape(0, tensors.rows, tokens, logit_rows=tokens)
        bound = self.target.bind(shape, input_ids=tensors.tokens, logits=tensors.target.logits)
        self.target.run(bound, [len(row.tokens) - 1 for row in rows])

    def _accept(
        self, rows: Sequence[Row], choices: Sequence[Choice], demands: Demands, tensors: RoundTensors
    ) -> list[Verdict]:
        width = tensors.draft_length + 1
        tokens = self.backend.read(tensors.tokens) if tensors.draft_length else []
        proposals = [
            tokens[index * width + 1 : index * width + 1 + choice.length] for index, choice in enumerate(choices)
        ]
        places = _places(rows, proposals, width) if demands.edits else None
        shaped = self.sampler.shape(tensors.target, tensors, demands, places)
        decided = self._decided(rows, choices, demands, tensors, shaped)
        verdicts = [
            Verdict(proposed, accepted, following, draft=choice.draft)
            for proposed, (accepted, following), choice in zip(proposals, decided, choices, strict=True)
        ]
        if demands.logprobs:
            return read_logprobs(self.backend, self.sampler, shaped, tensors, demands, rows, verdicts)
        return verdicts

    def _decided(
        self,
        rows: Sequence[Row],
        choices: Sequence[Choice],
        demands: Demands,
        tensors: RoundTensors,
        shaped: Shaped,
    ) -> list[tuple[int, int]]:
        """Each row's accepted count and next token; a batch in which several verifications decide runs each of them."""
        read = self.backend.read
        if tensors.draft_length == 0:
            self.sampler.draw(shaped, tensors, demands)
            return [(0, token) for token in read(tensors.next_token)]
        drawn = [choice.draft is not None and not self.drafts[choice.draft].points for choice in choices]
        # A row without proposals takes the graph that runs anyway: any of its law's will do.
        graphs = [
            demands.law_of(row).verification(points=not (drawn[index] or (choice.draft is None and any(drawn))))
            for index, (row, choice) in enumerate(zip(rows, choices, strict=True))
        ]
        decided: dict[int, tuple[int, int]] = {}
        for graph in dict.fromkeys(graphs):
            self.sampler.verify(graph, shaped, tensors, demands)
            found = list(zip(read(tensors.accepted), read(tensors.next_token), strict=True))
            decided |= {index: found[index] for index in range(len(rows)) if graphs[index] == graph}
        return [decided[index] for index in range(len(rows))]

    def commit(self, index: int, row: Row, tokens: Sequence[int], verdict: Verdict) -> None:
        """Row `index` has emitted these tokens, by this verdict."""
        for name in row.drafts:
            self.drafts[name].commit(index, tokens, verdict if verdict.draft == name else None)

    def end(self, index: int, last: int, *, clear: bool = False) -> None:
        """Row `index` has ended; the sequence of row `last` takes its place. `clear`: see `KeyValueCache.end`."""
        self.target.cache.end(index, last, clear=clear)
        for draft in self.drafts.values():
            draft.end(index, last, clear=clear)

    def trim(self, rows: Sequence[Row]) -> None:
        """Give back memory that these rows, the only ones of the batch, are far from needing."""
        slots = max((len(row.tokens) for row in rows), default=0) + self.draft_length
        with contextlib.suppress(BackendError):  # no room for the smaller copy: another time
            self.target.trim(len(rows), slots)
            for draft in self.drafts.values():
                draft.trim(len(rows), slots)
        if self._workspace is not None and self._workspace.rows >= 4 * max(len(rows), 1):
            self.sampler.forget()
            self._workspace = None

    def release(self) -> None:
        """Let go of caches and working memory; the next sequence takes new ones."""
        self.target.release()
        for draft in self.drafts.values():
            draft.release()
        self.sampler.forget()
        self._workspace = None

    def _tensors(self, rows: int, draft_length: int) -> RoundTensors:
        if self._workspace is None or self._workspace.rows < rows:
            self.sampler.forget()
            self._workspace = Workspace(
                self.backend,
                rows=max(rows, self.target.cache.rows),
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
