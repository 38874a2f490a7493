"""The library's face: open an engine directory, generate, stream."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from forerun import contract
from forerun.backends import open_backend
from forerun.controls import Controls
from forerun.costs import CostFile, Costs, measure
from forerun.directory import EngineDirectory
from forerun.draft import Draft, ModelDraft, SteppingDraft
from forerun.engine import Engine
from forerun.errors import RequestError
from forerun.head import HeadDraft
from forerun.loop import Loop
from forerun.manifest import ModelRecord
from forerun.model import CachedModel
from forerun.ngram import NgramDraft
from forerun.planning import Planner
from forerun.profiling import calls_of_a_round
from forerun.randomness import fresh_seed, sibling_seed
from forerun.request import (
    Prompt,
    Request,
    TokenArray,
    as_request,
    as_requests,
    check_tokens,
    edit_rules,
    prompt_tokens,
)
from forerun.row import Chunk, FinishReason, Row, TokenLogprob
from forerun.sampling import Sampler
from forerun.scheduler import Scheduler
from forerun.stats import Stats
from forerun.tokenizer import Tokenizer

REPEATABLE_DRAFT_LENGTH = 4
"""K where it must not depend on time, and is not given."""


@dataclass(frozen=True)
class Generation:
    """One finished sequence. `token_ids` are the emitted tokens; an end token is among them, but not in `text`."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    seed: int
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The object that `forerun generate --json` prints."""
        data = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "stats": self.stats.to_json(),
        }
        if self.logprobs is not None:
            data["logprobs"] = [
                {"token": entry.token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
                for entry in self.logprobs
            ]
        return data


class Decoder:
    """An engine directory, loaded. Safe to use from several threads: their sequences share batches.

    Sequences never influence each other, so what else runs at the same time changes the speed only.
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int | None = None, load_draft: bool = True) -> None:
        self.directory = EngineDirectory.open(Path(path))
        self.manifest = manifest = self.directory.manifest
        self.backend = open_backend(manifest.backend.name, manifest.backend.device, threads=threads)
        with ThreadPoolExecutor() as pool:  # each is the work of one thread, most of it packing weights
            target = pool.submit(self._load, "target", manifest.target)
            draft = pool.submit(self._load, "draft", manifest.draft) if load_draft and manifest.draft else None
            tokenizer, graphs = pool.submit(self._open_tokenizer), pool.submit(self._load_sampling)
        self.target, self.tokenizer = target.result(), tokenizer.result()
        self._sampler = sampler = Sampler(graphs.result(), self.backend)
        self.draft = self._draft(draft.result()) if draft is not None else None
        drafts: list[Draft] = [*([self.draft] if self.draft is not None else []), NgramDraft(self.backend)]
        by_name = {draft.name: draft for draft in drafts}
        planner = Planner(by_name, lambda: self.costs)
        loop = Loop(self.backend, self.target, by_name, sampler, planner, draft_length=manifest.limits.draft_length)
        self.scheduler = Scheduler(loop, max_rows=manifest.limits.batch)
        self._lock = threading.Lock()
        self._closed = False

    @cached_property
    def costs(self) -> Costs:
        """What the calls of a round take on this machine. Measured once, for a second or a few, and then kept."""
        draft = self.draft
        hashes = [record.sha256 for record in self.manifest.files.values()]
        kept = CostFile([self.backend.identity, "" if draft is None else "model", *hashes])
        if (costs := kept.read()) is None:
            longest = self.manifest.limits.draft_length
            costs = measure(calls_of_a_round(self.backend, self.target, draft, self._sampler, draft_length=longest))
            kept.write(costs)
        return costs

    def _draft(self, model: CachedModel) -> SteppingDraft[Any]:
        manifest = self.manifest
        if manifest.draft is not None and manifest.draft.is_head:
            return HeadDraft(model, self.target, self._sampler, self.backend, longest=manifest.limits.draft_length)
        return ModelDraft(model, self._sampler, self.backend)

    def _open_tokenizer(self) -> Tokenizer:
        record = self.manifest.tokenizer
        return Tokenizer.open(
            self.directory.path,
            end_tokens=record.end_tokens,
            bos_token=record.bos_token,
            eos_token=record.eos_token,
        )

    def _load_sampling(self) -> Mapping[str, Engine]:
        return {name: self.backend.load(self.directory.file(file)) for name, file in self.manifest.sampling.items()}

    def _load(self, role: str, record: ModelRecord) -> CachedModel:
        graph, features = self.directory.file(record.graph), contract.features_of(role, self.manifest)
        engine = self.backend.load(graph, weights_folder=self.directory.file(record.weights).parent)
        contract.check(engine, record.architecture, graph, features)
        positions = self.manifest.limits.context
        return CachedModel(engine, self.backend, record.architecture, positions=positions, features=features)

    @overload
    def generate(self, prompts: str | Request, /, **controls: Any) -> Generation: ...
    @overload
    def generate(self, prompts: Sequence[int], /, **controls: Any) -> Generation: ...
    @overload
    def generate(self, prompts: Sequence[Mapping[str, object]], /, **controls: Any) -> Generation: ...
    @overload
    def generate(self, prompts: Sequence[Prompt | Request], /, **controls: Any) -> list[Generation]: ...
    @overload
    def generate(self, prompts: TokenArray, /, **controls: Any) -> Generation | list[Generation]: ...

    def generate(self, prompts: Any, /, **controls: Any) -> Generation | list[Generation]:
        """Decode one prompt, or a batch of them together.

        A prompt is text, a sequence of token ids (a list, a range, an array of one dimension), or a list of chat
        messages; a batch is a list of prompts or of `Request`s, which carry their own controls, or an array of two
        dimensions. `controls` are those of `Controls`, for every prompt that brings none. A batch may be larger than
        the engines' maximum: what does not fit waits for a row.

        Gives a list for a batch, and for a prompt of which `n` > 1 samples are wanted; in a batch, the samples of a
        prompt follow one another.

        Raises RequestError, before any work, for a prompt or a control that cannot be honoured.
        """
        requests, batch = as_requests(prompts, controls)
        rows: list[Row] = []
        for request in requests:
            rows += self._rows(request, first_number=len(rows))
        self._add(rows)
        try:
            for row in rows:
                while not row.finished():
                    row.chunks.clear()
                    self._step(row)
        finally:
            _cancel(rows)
        generations = [_generation(row) for row in rows]
        return generations if batch or len(generations) > 1 else generations[0]

    def stream(self, prompt: Prompt | TokenArray | Request, /, **controls: Any) -> Generator[Chunk, None, Generation]:
        """Decode one prompt and yield what each round emitted.

        The chunks' texts add up to the text that `generate` returns; a chunk's text can be empty. Leaving the
        iterator ends the sequence. Several streams may be read in turn: they are decoded in one batch.
        The generator's return value is the `Generation`. Raises as `generate` does, at once.
        """
        request = as_request(prompt, controls)  # type: ignore[arg-type]  # an array becomes token ids
        if request.controls.n > 1:
            raise RequestError(f"n is {request.controls.n}: a stream carries one sample; open a stream for each")
        return self._stream(self._rows(request)[0])

    def _stream(self, row: Row) -> Generator[Chunk, None, Generation]:
        self._add([row])
        try:
            while True:
                while row.chunks:
                    yield row.chunks.popleft()
                if row.finished():
                    return _generation(row)
                self._step(row)
        finally:
            _cancel([row])

    def _add(self, rows: Sequence[Row]) -> None:
        with self._lock:
            if self._closed:
                raise RequestError("this decoder is closed; open the engine directory again")
            if any(row.adaptive and row.drafts for row in rows):
                _ = self.costs  # now, so that the time of measuring is not taken for a row's
            for row in rows:
                self.scheduler.add(row)

    def _step(self, row: Row) -> None:
        """Decode a round of the whole batch, unless another thread has just done it for this row."""
        with self._lock:
            if row.active and not row.chunks:
                self.scheduler.step()

    def _rows(self, request: Request, *, first_number: int = 0) -> list[Row]:
        """A row for each sample of a request, numbered from `first_number` on."""
        controls, limits, size = request.controls, self.manifest.limits, self.target.vocabulary_size
        tokens = prompt_tokens(request.prompt, self.tokenizer, controls)
        check_tokens(tokens, vocabulary_size=size, context=limits.context)
        rules = edit_rules(controls, self.tokenizer, vocabulary_size=size)
        drafts, draft_length = self._drafts(controls)
        seed = fresh_seed() if controls.seed is None else controls.seed
        return [
            Row(
                tokens,
                controls,
                self.tokenizer,
                context=limits.context,
                drafts=drafts,
                draft_length=draft_length,
                adaptive=controls.draft_length is None and not controls.repeatable,
                rules=rules,
                seed=sibling_seed(seed, sample),
                number=first_number + sample,
            )
            for sample in range(controls.n)
        ]

    def _drafts(self, controls: Controls) -> tuple[list[str], int]:
        """The drafts that may propose, and the largest K."""
        limit, has_model = self.manifest.limits.draft_length, self.draft is not None
        if controls.draft == "model" and not has_model:
            raise RequestError("draft model: this engine directory has none; export one with --draft, or use ngram")
        if controls.draft_length is not None and controls.draft_length > limit:
            raise RequestError(
                f"draft_length is {controls.draft_length}; these engines were exported for at most {limit}"
            )
        if controls.draft == "none" or controls.draft_length == 0:
            return [], 0
        if controls.draft != "auto":
            drafts: list[str] = [controls.draft]
        elif controls.draft_length is not None or controls.repeatable:
            drafts = ["model" if has_model else "ngram"]
        else:
            drafts = ["model", "ngram"] if has_model else ["ngram"]
        if controls.draft_length is not None:
            return drafts, controls.draft_length
        return drafts, min(REPEATABLE_DRAFT_LENGTH, limit) if controls.repeatable else limit

    def close(self) -> None:
        """End the sequences that are being decoded and let go of their memory. The engines go with this object."""
        with self._lock:
            self._closed = True
            self.scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cancel(rows: Sequence[Row]) -> None:
    """Mark them: the next step lets go of their places. No lock, because it may run in a finalizer."""
    for row in rows:
        row.cancel()


def _generation(row: Row) -> Generation:
    assert row.finish_reason is not None
    return Generation(
        text=row.text,
        token_ids=tuple(row.tokens[row.prompt_tokens :]),
        prompt_tokens=row.prompt_tokens,
        finish_reason=row.finish_reason,
        seed=row.seed,
        stats=row.stats,
        logprobs=None if row.controls.logprobs is None else tuple(row.logprobs),
    )
