"""The target's hidden states of every answer, kept on disk in 16 bits; what is there already is not computed again."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ExportError
from forerun_export.heads.answers import Answer
from forerun_export.heads.teacher import Teacher
from forerun_export.progress import Report, silent
from forerun_export.writer import require_space

BATCH_TOKENS = 4096
_BYTES = 2


@dataclass(frozen=True)
class Example:
    """A prompt with its answer: `tokens` [T], `hidden` [T,3h] float16 as `Teacher.hidden` gives it.

    Tokens from `begins` on are the answer, decoded at `temperature`.
    """

    number: int
    kind: str
    temperature: float
    tokens: Tensor
    begins: int
    hidden: Tensor


class FeatureCache:
    """hidden.f16, hidden states one after another, and hidden.jsonl, which says where each answer's begin."""

    def __init__(self, folder: Path, width: int) -> None:
        self._data, self._index = folder / "hidden.f16", folder / "hidden.jsonl"
        self._width = width
        self._places = self._read_index()

    def __contains__(self, answer: Answer) -> bool:
        return answer.number in self._places

    def add(self, number: int, hidden: Tensor) -> None:
        """Append an answer's hidden states; they count once the index names them."""
        rows = sum(length for _, length in self._places.values())
        mode = "r+b" if self._data.exists() else "w+b"
        with self._data.open(mode) as file:
            file.seek(rows * self._width * _BYTES)
            file.write(hidden.numpy().tobytes())
        self._places[number] = rows, len(hidden)
        with self._index.open("a") as index:
            index.write(json.dumps({"number": number, "row": rows, "rows": len(hidden)}) + "\n")

    def example(self, answer: Answer) -> Example:
        """An answer with its hidden states, which are read from disk as they are used."""
        row, rows = self._places[answer.number]
        tokens = (*answer.prompt, *answer.answer)
        if rows != len(tokens):
            raise ExportError(f"{self._index} belongs to other answers; remove it, and it is made again")
        offset = row * self._width * _BYTES
        # Copy on write: torch has no tensors that must not be written to.
        hidden = np.memmap(self._data, np.float16, "c", offset, (rows, self._width))
        return Example(
            answer.number,
            answer.kind,
            answer.temperature,
            torch.tensor(tokens),
            len(answer.prompt),
            torch.from_numpy(hidden),
        )

    def _read_index(self) -> dict[int, tuple[int, int]]:
        if not self._index.exists():
            return {}
        text = self._index.read_text()
        entries = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return {entry["number"]: (entry["row"], entry["rows"]) for entry in entries}


def cache_features(
    teacher: Teacher, answers: Sequence[Answer], folder: Path, *, report: Report = silent
) -> list[Example]:
    """All answers with their hidden states, those computed now that the folder lacks."""
    cache = FeatureCache(folder, 3 * teacher.hidden_size)
    lacking = sorted((answer for answer in answers if answer not in cache), key=_length)
    require_space(
        folder, sum(map(_length, lacking)) * 3 * teacher.hidden_size * _BYTES, other_place="use another --work"
    )
    done = len(answers) - len(lacking)
    for batch in batches(lacking):
        hidden = teacher.hidden([(*answer.prompt, *answer.answer) for answer in batch], bfloat16=True)
        for answer, rows in zip(batch, hidden, strict=True):
            cache.add(answer.number, rows)
        done += len(batch)
        report("Reading hidden states", done, len(answers))
    return [cache.example(answer) for answer in answers]


def batches(answers: Iterable[Answer]) -> Iterable[list[Answer]]:
    """Neighbours together, as many as BATCH_TOKENS holds when all are as long as the longest."""
    batch: list[Answer] = []
    for answer in answers:
        if batch and max(_length(answer), *map(_length, batch)) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(answer)
    if batch:
        yield batch


def _length(answer: Answer) -> int:
    return len(answer.prompt) + len(answer.answer)
