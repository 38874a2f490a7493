"""Examples as padded batches, in an order that is a function of seed and epoch alone."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun_export.heads.features import Example

_SORTED_TOGETHER = 16  # batches: neighbours of like length waste little on padding


@dataclass(frozen=True)
class Batch:
    """B sequences padded to T tokens: `tokens` [B,T], `hidden` [B,T,3h]; answers go from `begins` to `ends` [B]."""

    tokens: Tensor
    hidden: Tensor
    begins: Tensor
    ends: Tensor

    @property
    def first(self) -> int:
        """The first entry from which a drafting step can go on: that of the last token of the shortest prompt."""
        return max(1, int(self.begins.min()) - 1)

    def entries(self, step: int) -> Tensor:
        """Which entries [B,T-2] of a step (from 0) are in the loss.

        Entry t predicts token t+2, one of the answer's, from true features of entry t - step, which is the prompt's
        last but one or a later one.
        """
        t = torch.arange(self.tokens.shape[1] - 2, device=self.tokens.device)[None]
        return (t >= self.begins[:, None] - 2 + step) & (t < self.ends[:, None] - 2)

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        return Batch(*(part.to(device) for part in (self.tokens, self.hidden, self.begins, self.ends)))


def collate(examples: Sequence[Example]) -> Batch:
    """The examples as one batch, padded with zeros."""
    pad = torch.nn.utils.rnn.pad_sequence
    return Batch(
        pad([example.tokens for example in examples], batch_first=True),
        pad([example.hidden for example in examples], batch_first=True),
        torch.tensor([example.begins for example in examples]),
        torch.tensor([len(example.tokens) for example in examples]),
    )


def epoch(examples: Sequence[Example], *, batch: int, seed: int, number: int) -> list[list[Example]]:
    """All examples in batches of `batch`, in the order of this epoch."""
    chance = random.Random(f"{seed} {number}")
    shuffled = list(examples)
    chance.shuffle(shuffled)
    window = batch * _SORTED_TOGETHER
    ordered = [
        example
        for start in range(0, len(shuffled), window)
        for example in sorted(shuffled[start : start + window], key=lambda example: len(example.tokens))
    ]
    groups = [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    chance.shuffle(groups)
    return groups


def forever(examples: Sequence[Example], *, batch: int, seed: int, skip: int = 0) -> Iterator[list[Example]]:
    """Batches of one epoch after another, less the first `skip`."""
    an_epoch = -(-len(examples) // batch)
    number = skip // an_epoch
    skip %= an_epoch
    while True:
        yield from epoch(examples, batch=batch, seed=seed, number=number)[skip:]
        number, skip = number + 1, 0
