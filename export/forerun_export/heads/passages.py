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


def read_texts(paths: Sequence[str]) -> list[str]:
    """The texts of files, and of folders' files with one of ENDINGS.

    Raises ExportError for a path without text, or that cannot be read.
    """
    texts = []
    for path in paths:
        of_path = [text for file in _files(Path(path)) if (text := _read(file)).strip()]
        if not of_path:
            raise ExportError(f"{path} holds no text (of a folder, files that end in {', '.join(ENDINGS)} are read)")
        texts += of_path
    return texts


def passages(texts: Sequence[str], tokenizer: Tokenizer, *, limit: int, seed: int) -> list[Answer]:
    """At most `limit` pieces of SHORTEST to PASSAGE tokens; of a longer list, those that the seed draws."""
    found = [one for text in texts for one in _cut(text, tokenizer)]
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
