"""A tiny target with answers that are no text, and their hidden states, to train heads on in a second."""

from collections.abc import Sequence
from pathlib import Path

import torch

from forerun_export.heads.answers import Answer
from forerun_export.heads.features import Example, cache_features
from forerun_export.heads.lessons import Lesson, lessons
from forerun_export.heads.teacher import Teacher
from forerun_export.sources import resolve
from helpers.checkpoints import VOCABULARY_SIZE, tiny_llama


def tiny_teacher(folder: Path) -> Teacher:
    return Teacher(resolve(str(tiny_llama(folder / "target"))))


def random_answers(count: int, *, seed: int = 0) -> list[Answer]:
    """Of several lengths, both kinds and both temperatures."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCABULARY_SIZE, (length,), generator=generator).tolist())

    return [
        Answer(
            number,
            ("chat", "code body")[number % 2],
            float(number // 2 % 2),
            tokens(4 + number % 3),
            tokens(6 + number % 4),
        )
        for number in range(count)
    ]


def random_examples(teacher: Teacher, folder: Path, count: int = 12) -> Sequence[Example]:
    return cache_features(teacher, random_answers(count), folder)


def random_lessons(
    teacher: Teacher, tokens: torch.Tensor, folder: Path, count: int = 12
) -> tuple[Sequence[Lesson], Sequence[Example]]:
    """Lessons, and the examples that they are of."""
    examples = random_examples(teacher, folder, count)
    return lessons(teacher, tokens, examples, folder), examples
