"""Lessons as padded batches, in an order that is a function of seed and epoch alone."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun_export.heads.lessons import Lesson

_SORTED_TOGETHER = 16  # batches: neighbours of like length waste little on padding


@dataclass(frozen=True)
class Batch:
    """B texts padded to T tokens: `tokens` [B,T], `hidden` [B,T,3h], `mean_rows` [B,T,h].

    They are to be learnt from `since` to `ends` [B].
    """

    tokens: Tensor
    hidden: Tensor
    mean_rows: Tensor
    since: Tensor
    ends: Tensor

    @property
    def first(self) -> int:
        """The first entry from which a drafting step can go on: that of the last token before what is learnt."""
        return max(1, int(self.since.min()) - 1)

    def entries(self, step: int) -> Tensor:
        """Which entries [B,T-2] of a step (from 0) are in the loss.

        Entry t predicts token t+2, one that is to be learnt, from true features of entry t - step, which is that of
        the last token but one before these or a later one.
        """
        t = torch.arange(self.tokens.shape[1] - 2, device=self.tokens.device)[None]
        return (t >= self.since[:, None] - 2 + step) & (t < self.ends[:, None] - 2)

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        return Batch(*(part.to(device) for part in (self.tokens, self.hidden, self.mean_rows, self.since, self.ends)))


def collate(lessons: Sequence[Lesson]) -> Batch:
    """The lessons as one batch, padded with zeros."""
    examples = [lesson.example for lesson in lessons]

    def padded(rows: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    return Batch(
        padded([one.tokens for one in examples]),
        padded([one.hidden for one in examples]),
        padded([lesson.mean_rows for lesson in lessons]),
        torch.tensor([lesson.since for lesson in lessons]),
        torch.tensor([len(one.tokens) for one in examples]),
    )


def epoch(lessons: Sequence[Lesson], *, batch: int, seed: int, number: int) -> list[list[Lesson]]:
    """All lessons in batches of `batch`, in the order of this epoch."""
    chance = random.Random(f"{seed} {number}")
    shuffled = list(lessons)
    chance.shuffle(shuffled)
    window = batch * _SORTED_TOGETHER
    ordered = [
        lesson
        for start in range(0, len(shuffled), window)
        for lesson in sorted(shuffled[start : start + window], key=lambda lesson: len(lesson.example.tokens))
    ]
    groups = [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    chance.shuffle(groups)
    return groups


def forever(lessons: Sequence[Lesson], *, batch: int, seed: int, skip: int = 0) -> Iterator[list[Lesson]]:
    """Batches of one epoch after another, less the first `skip`."""
    an_epoch = -(-len(lessons) // batch)
    number = skip // an_epoch
    skip %= an_epoch
    while True:
        yield from epoch(lessons, batch=batch, seed=seed, number=number)[skip:]
        number, skip = number + 1, 0
