"""The checkpoint as onnxruntime-genai runs it: built by its own builder, decoded by its generator.

Its speculative decoding from the text itself ("n-gram lookup") runs on the same model; the draft length is fixed.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnxruntime_genai

from forerun_export.bench.genai_build import model_folder
from forerun_export.bench.runs import Output, Round, Task

NGRAM = {"ngram_size": 3, "max_draft_tokens": 4}
"""Matches of three tokens, and four proposals, the library's own default."""
TRIED_TOKENS = 16
TRIED_TIMES = 3


class GenaiSystem:
    """A model in forerun's precision, with the thread setting that decodes fastest here of a few."""

    def __init__(self, checkpoint: str, *, threads: int, end_tokens: Sequence[int], precision: str) -> None:
        self._folder = str(model_folder(checkpoint, precision))
        self._end_tokens = list(end_tokens)
        self._tried: dict[str, float] = {}
        self._best = ""
        self._choose(threads)

    def _choose(self, threads: int) -> None:
        """Keep the model with the setting of the highest speed."""
        kept = None
        for name, options in settings(threads).items():
            model = self._open(options)
            self._tried[name] = max(_speed(self._decode(model, _trial())) for _ in range(TRIED_TIMES))
            if self._tried[name] == max(self._tried.values()):
                kept, self._best = model, name
            del model  # two are in memory at the most
        self._model = kept

    def _open(self, options: Mapping[str, Any]) -> Any:
        config = onnxruntime_genai.Config(self._folder)
        model: dict[str, Any] = {"decoder": {"session_options": dict(options)}}
        if self._end_tokens:
            model["eos_token_id"] = self._end_tokens
        config.overlay(json.dumps({"model": model}))
        return onnxruntime_genai.Model(config)

    def decode(self, task: Task) -> Output:
        """See `System.decode`."""
        return self._decode(self._model, task)

    def _decode(self, model: Any, task: Task) -> Output:
        started = time.perf_counter()
        generator = onnxruntime_genai.Generator(model, _parameters(model, task))
        generator.append_tokens(list(task.tokens))
        rounds = list(_rounds(generator, started, speculative=task.draft == "ngram"))
        return Output(tuple(generator.get_sequence(0).tolist()[len(task.tokens) :]), tuple(rounds))

    def profile(self) -> Mapping[str, Any]:
        """See `System.profile`: the setting in use, and tokens/s of each that was tried."""
        return {"setting": self._best, "tried_tokens_per_s": dict(self._tried)}


def settings(threads: int) -> dict[str, Mapping[str, Any]]:
    """Session options to try, by their name: all threads or half of them, which wait busily or sleep."""
    waits = {"spinning": "1", "not spinning": "0"}
    return {
        f"{count} thread{'s' * (count > 1)}, {name}": {
            "intra_op_num_threads": count,
            "session.intra_op.allow_spinning": spins,
        }
        for count in dict.fromkeys([threads, -(-threads // 2)])
        for name, spins in waits.items()
        if count > 1 or spins == "1"  # one thread waits for no other
    }


def _parameters(model: Any, task: Task) -> Any:
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(task.tokens) + task.max_new_tokens, do_sample=task.temperature > 0)
    if task.temperature > 0:  # of the whole vocabulary
        parameters.set_search_options(temperature=task.temperature, top_k=0, top_p=1.0, random_seed=task.seed)
    if task.draft == "ngram":
        parameters.set_speculative_options(**NGRAM)
    return parameters


def _rounds(generator: Any, started: float, *, speculative: bool) -> Iterator[Round]:
    """A round for each call of the target; tokens that a round gave together are asked for one by one."""
    before = _counts(generator) if speculative else None
    latest: Round | None = None
    while not generator.is_done():
        waiting = before is not None and before["tokens_buffered"] > 0
        generator.generate_next_token()
        at_s = time.perf_counter() - started
        if waiting and latest is not None:
            latest = replace(latest, at_s=at_s, tokens=latest.tokens + 1)
        else:
            if latest is not None:
                yield latest
            latest = Round(at_s, 1)
        if before is not None:
            now = _counts(generator)
            if not waiting:
                latest = replace(latest, **_proposals(before, now))
            before = now
    if latest is not None:
        yield latest


def _counts(generator: Any) -> Mapping[str, int]:
    counts: Mapping[str, int] = generator.get_speculative_stats()
    return counts


def _proposals(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, Any]:
    proposed = now["draft_tokens_proposed"] - before["draft_tokens_proposed"]
    accepted = now["draft_tokens_accepted"] - before["draft_tokens_accepted"]
    return {"proposed": proposed, "accepted": accepted, "draft": "ngram" if proposed else None}


def _trial() -> Task:
    return Task(tokens=range(2, 66), max_new_tokens=TRIED_TOKENS)


def _speed(output: Output) -> float:
    first, last = output.rounds[0], output.rounds[-1]
    return (len(output.rounds) - 1) / (last.at_s - first.at_s) if last.at_s > first.at_s else 0.0
