"""The target asks itself questions and answers prompts, through forerun's runtime, a full batch at a time.

Everything is kept in files of JSON lines that grow as texts end: a run that is stopped goes on where it was.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forerun.cache import CAPACITY_STEP
from forerun.controls import Controls
from forerun.decoder import Decoder, Generation
from forerun.errors import ExportError
from forerun.request import Request
from forerun_export.bench.prompts import BenchPrompt
from forerun_export.heads.json_lines import append_line, read_lines
from forerun_export.heads.prompts import CHAT, SYSTEM_LINES, is_question, opening
from forerun_export.progress import Report, silent

LONGEST_QUESTION = 96  # tokens
ASKING = Controls(temperature=0.9, top_p=0.95, max_new_tokens=LONGEST_QUESTION, raw=True, draft="none")
_SEEDS_A_RUN = 1 << 40


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt and of what the target answered, at this temperature; `kind` is reported apart."""

    number: int
    kind: str
    temperature: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def ask(decoder: Decoder, count: int, path: Path, *, seed: int, report: Report = silent) -> list[BenchPrompt]:
    """`count` different user's messages that the target writes by itself, with the attempts kept at `path`.

    Its chat template up to the user's message is all that it is given (Xu et al. 2406.08464), with some system lines
    for variety. A message counts if the target ended it, and `is_question` holds.
    """
    attempts = {int(entry["number"]): entry["text"] for entry in read_lines(path)}
    openings = _openings(decoder)
    numbers = range(4 * count)
    while len(kept := _different(attempts)) < count:
        missing = [number for number in numbers if number not in attempts]
        if not missing:
            raise ExportError(f"the target asks no {count} different questions; ask for fewer with --self-prompts")
        wanted = missing[: max(2 * decoder.manifest.limits.batch, (count - len(kept)) * 5 // 4)]
        requests = (
            (number, Request(openings[number % len(openings)], replace(ASKING, seed=seed * _SEEDS_A_RUN + number)))
            for number in wanted
        )
        for number, generation in _decode(decoder, requests):
            text = generation.text.strip() if generation.finish_reason == "stop" else ""
            attempts[number] = text
            append_line(path, {"number": number, "text": text})
            report("Asking questions", min(len(_different(attempts)), count), count)
    return [BenchPrompt(CHAT, text) for text in kept[:count]]


def answer(
    decoder: Decoder,
    prompts: Sequence[BenchPrompt],
    path: Path,
    *,
    max_new_tokens: int,
    seed: int,
    report: Report = silent,
) -> list[Answer]:
    """What the target says to each prompt: greedily to every other pair, else at temperature 1; kept at `path`.

    Those that need the fewest cache slots come first: attention pays for the slots of the longest text of a batch.
    Prompts that leave no room for an answer are left out. Raises ExportError if all do.
    """
    tokens = [prompt.tokens(decoder.tokenizer) for prompt in prompts]
    fitting = _fitting(tokens, max_new_tokens, decoder.manifest.limits.context, report)
    fits = set(fitting)
    found = {
        one.number: replace(one, kind=prompts[one.number].category)
        for one in read_answers(path)
        if one.number in fits and one.prompt == tokens[one.number]  # other options number other prompts
    }
    lacking = [number for number in fitting if number not in found]

    def requests() -> Iterator[tuple[int, Request]]:
        for number in sorted(lacking, key=lambda number: _capacity(len(tokens[number]) + max_new_tokens)):
            controls = Controls(
                temperature=_temperature(number),
                max_new_tokens=max_new_tokens,
                seed=seed * _SEEDS_A_RUN + number,
                draft="none",
            )
            yield number, Request(tokens[number], controls)

    for number, generation in _decode(decoder, requests()):
        kind, drawn = prompts[number].category, tuple(generation.token_ids)
        found[number] = Answer(number, kind, _temperature(number), tokens[number], drawn)
        append_line(path, asdict(found[number]))
        report("Answering", len(found), len(fitting))
    return [found[number] for number in fitting]


def _fitting(prompts: Sequence[Sequence[int]], max_new_tokens: int, context: int, report: Report) -> list[int]:
    """Numbers of the prompts that leave room for an answer."""
    fitting = [number for number, tokens in enumerate(prompts) if len(tokens) + max_new_tokens <= context]
    if prompts and not fitting:
        raise ExportError(
            f"no prompt leaves room for {max_new_tokens} tokens in a context of {context}; "
            "lower --max-new-tokens, raise --context or give shorter prompts"
        )
    if left_out := len(prompts) - len(fitting):
        report(f"leaving out {left_out:,} prompts that are too long for --context")
    return fitting


def _capacity(tokens: int) -> int:
    return -(-tokens // CAPACITY_STEP)


def _temperature(number: int) -> float:
    return float(number // 2 % 2)  # in pairs, so that neither kind of code prompt is always greedy


def read_answers(path: Path) -> list[Answer]:
    """The answers that are there; of a number's, the last counts. Raises ExportError for a file of something else."""
    try:
        found = [
            Answer(
                int(entry["number"]),
                str(entry["kind"]),
                float(entry["temperature"]),
                tuple(entry["prompt"]),
                tuple(entry["answer"]),
            )
            for entry in read_lines(path)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{path} holds no answers ({error!r}); remove it, and they are made again") from error
    return sorted(found, key=lambda entry: entry.number)


def _decode(decoder: Decoder, requests: Iterable[tuple[int, Request]]) -> Iterator[tuple[int, Generation]]:
    """Each request's generation as it ends, with the batch always full."""
    waiting = iter(requests)
    streams: dict[int, Iterator[Any]] = {}
    while True:
        while len(streams) < decoder.manifest.limits.batch and (following := next(waiting, None)) is not None:
            streams[following[0]] = decoder.stream(following[1])
        if not streams:
            return
        for number, stream in list(streams.items()):
            try:
                next(stream)
            except StopIteration as stop:
                del streams[number]
                yield number, stop.value


def _openings(decoder: Decoder) -> list[str]:
    record, template = decoder.manifest.tokenizer, decoder.directory.path / "chat_template.jinja"
    if not template.exists():
        raise ExportError("the target has no chat template, so it cannot ask itself; give --prompts FILE")
    text = template.read_text("utf-8")
    return [opening(text, system, bos_token=record.bos_token, eos_token=record.eos_token) for system in SYSTEM_LINES]


def _different(attempts: Mapping[int, str]) -> list[str]:
    """The questions among the attempts, in order, each once; none behind an attempt that has not ended yet."""
    ended = itertools.takewhile(lambda number: number in attempts, itertools.count())
    texts = (attempts[number] for number in ended)
    return list(dict.fromkeys(text for text in texts if is_question(text)))
