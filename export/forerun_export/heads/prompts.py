"""Questions that the target answers for training: the user's own, ones that it asks itself, and Python functions."""

import ast
import itertools
import random
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from forerun.tokenizer import render_chat
from forerun_export.bench.prompts import BODY, BenchPrompt, of_human_eval

CHAT, CODE = "chat", "code"
LONGEST_CODE = 700  # characters of a signature and its docstring: with its answer, most need few cache slots
SHORTEST_CODE = 90

SYSTEM_LINES = (
    None,
    "You are a helpful assistant. The user asks short, varied questions about everyday life, science and history.",
    "You are an expert programmer who answers questions about code.",
    "You are a writing assistant. The user asks for stories, emails, poems, speeches and reviews.",
    "You are a math tutor. The user asks word problems.",
    "You play whatever role the user asks for.",
    "You are a careful reader. The user gives a text and asks for facts from it.",
    "You are a teacher. The user asks how things work in physics, biology, chemistry and economics.",
)
"""What the target is told before it writes a user's message; None leaves its chat template as it is."""


def opening(template: str, system: str | None, *, bos_token: str | None, eos_token: str | None) -> str:
    """Text of a conversation up to where the user's first message begins."""
    marker = "\N{OBJECT REPLACEMENT CHARACTER}"
    messages = [{"role": "user", "content": marker}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return render_chat(template, messages, bos_token=bos_token, eos_token=eos_token).partition(marker)[0]


def is_question(text: str) -> bool:
    """Whether a message that the target wrote as a user will do: some words, in letters that most of it is made of."""
    words = text.split()
    plain = sum(character.isascii() and (character.isalnum() or character.isspace()) for character in text)
    return len(words) >= 4 and plain >= 0.8 * len(text)


def code_prompts(count: int, *, seed: int, folder: Path | None = None) -> list[BenchPrompt]:
    """`count` functions of the Python files in `folder` (the standard library) to complete, as HumanEval asks for them.

    Every other answer is begun with the function's head, so that only the body is new.
    """
    if count == 0:
        return []
    heads = sorted(set(_function_heads(folder or Path(sysconfig.get_path("stdlib")))))
    random.Random(seed).shuffle(heads)
    both = [list(of_human_eval(head)) for head in heads[:count]]
    return [
        BenchPrompt(CODE, prompt.text, prompt.begun)
        for number, pair in enumerate(both)
        for prompt in pair
        if (prompt.category == BODY) == bool(number % 2)
    ]


def _function_heads(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        parts = set(path.relative_to(folder).parts)
        if parts & {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__phello__"}:
            continue
        try:
            source = path.read_text("utf-8")
            tree = ast.parse(source)
        except (SyntaxError, ValueError, OSError):
            continue
        lines = source.split("\n")  # as ast counts them: a form feed ends none
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (head := _head(node, lines)):
                yield head


def _head(function: ast.FunctionDef, lines: Sequence[str]) -> str | None:
    """Signature and docstring, if it has both and a body behind them."""
    if ast.get_docstring(function) is None or len(function.body) < 2 or not function.args.args:
        return None
    last = function.body[0].end_lineno
    head = textwrap.dedent("\n".join(lines[function.lineno - 1 : last])) + "\n"
    return head if SHORTEST_CODE <= len(head) <= LONGEST_CODE else None


def interleaved(*lists: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """All prompts, taken in turn, so that a run that ends early has seen every kind."""
    turns = itertools.zip_longest(*lists)
    return [prompt for turn in turns for prompt in turn if prompt is not None]
