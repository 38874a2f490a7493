"""What goes into a chat template: nested lists and mappings with texts in them, to be looked through and copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard


def texts_in(content: object, where: str) -> Iterator[tuple[str, str]]:
    """Every text in `content`, keys included, with the place where it stands: messages[0].content, .."""
    if isinstance(content, str):
        yield where, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from texts_in(key, f"a key of {where}")
            yield from texts_in(value, f"{where}.{key}")
    elif _is_list(content):
        for index, value in enumerate(content):
            yield from texts_in(value, f"{where}[{index}]")


def replaced(content: Any, change: Callable[[str], str] = str) -> Any:
    """A copy of `content`, down to its texts, with each of them changed; other values stay the objects they are."""
    if isinstance(content, str):
        return change(content)
    if isinstance(content, Mapping):
        return {replaced(key, change): replaced(value, change) for key, value in content.items()}
    if _is_list(content):
        return [replaced(value, change) for value in content]
    return content


def _is_list(content: object) -> TypeGuard[Sequence[object]]:
    return isinstance(content, Sequence) and not isinstance(content, (str, bytes, bytearray, memoryview))
