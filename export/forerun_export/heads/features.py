"""The target's hidden states of every answer, kept on disk."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun_export.heads.answers import Answer
from forerun_export.heads.row_file import BYTES, RowFile, tokens_key
from forerun_export.heads.teacher import Teacher
from forerun_export.progress import Report, silent
from forerun_export.writer import require_space

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Example:
    """A prompt with its answer: `tokens` [T], `hidden` [T,3h] float16 as `Teacher.hidden` gives it.

    Tokens from `begins` on are the answer, decoded at `temperature`.
    """

    kind: str
    temperature: float
    tokens: Tensor
    begins: int
    hidden: Tensor

    @property
    def key(self) -> str:
        """What its rows are found by."""
        return tokens_key(self.tokens.tolist())


def cache_features(
    teacher: Teacher, answers: Sequence[Answer], folder: Path, *, report: Report = silent
) -> list[Example]:
    """All answers with their hidden states, those computed now that the folder lacks."""
    width = 3 * teacher.hidden_size
    rows = RowFile(folder, "hidden", width)
    keys = [tokens_key((*answer.prompt, *answer.answer)) for answer in answers]
    lacking = sorted((answer for key, answer in zip(keys, answers, strict=True) if key not in rows), key=_length)
    require_space(folder, sum(map(_length, lacking)) * width * BYTES, other_place="use another --work")
    done = len(answers) - len(lacking)
    for batch in batches(lacking):
        hidden = teacher.hidden([(*answer.prompt, *answer.answer) for answer in batch], bfloat16=True)
        for answer, found in zip(batch, hidden, strict=True):
            rows.add(tokens_key((*answer.prompt, *answer.answer)), found)
        done += len(batch)
        report("Reading hidden states", done, len(answers))
    return [
        Example(
            answer.kind,
            answer.temperature,
            torch.tensor((*answer.prompt, *answer.answer)),
            len(answer.prompt),
            rows.read(key),
        )
        for key, answer in zip(keys, answers, strict=True)
    ]


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
