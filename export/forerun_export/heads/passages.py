"""Plain text to learn from: what the target would say at every place of it counts, not who wrote it."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from forerun.errors import ExportError
from forerun.tokenizer import Tokenizer
from forerun_export.heads.answers import Answer

TEXT = "text"
PASSAGE, SHORTEST = 256, 32  # tokens
ENDINGS = (".txt", ".md", ".rst", ".py")


def passages(paths: Sequence[str], tokenizer: Tokenizer, *, limit: int, seed: int) -> list[Answer]:
    """At most `limit` passages of up to PASSAGE tokens, from files and from folders' files with one of ENDINGS.

    Those of a longer list are drawn by the seed. Raises ExportError for a path without text.
    """
    found = []
    for path in paths:
        of_path = [one for file in _files(Path(path)) for one in _cut(_read(file), tokenizer)]
        if not of_path:
            raise ExportError(f"{path} holds no text of {SHORTEST} tokens or more; give another with --text")
        found += of_path
    if len(found) > limit:
        found = random.Random(seed).sample(found, limit)
    return [Answer(number, TEXT, 1.0, one[:1], one[1:]) for number, one in enumerate(found)]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file())


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error.strerror}); give another with --text") from error


def _cut(text: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for start in range(0, len(tokens), PASSAGE):
        if len(piece := tuple(tokens[start : start + PASSAGE])) >= SHORTEST:
            yield piece
