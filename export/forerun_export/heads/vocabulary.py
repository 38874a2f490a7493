"""Which tokens a head proposes: those that the target would say most often."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from forerun_export.heads.features import Example
from forerun_export.heads.teacher import Teacher

PLACES = 50_000
_ROWS = 512


@torch.no_grad()
def expected_counts(teacher: Teacher, examples: Sequence[Example]) -> Tensor:
    """How often each token [V] is expected in the answers: the sum of the target's laws over about PLACES places.

    A law also tells of tokens that were not drawn. Counting texts finds rare tokens only where they happen to occur,
    and misses a third more of those that other texts hold.
    """
    counts, places = torch.zeros(len(teacher.head), device=teacher.device), 0
    for example in examples:
        if places >= PLACES:
            break
        final = teacher.final(example.hidden[example.begins - 1 : -1].to(teacher.device))
        for rows in torch.split(final, _ROWS):
            with torch.autocast(teacher.device.type, torch.bfloat16):
                logits = rows @ teacher.head.T
            counts += logits.float().softmax(-1).sum(0)
        places += len(final)
    return counts.cpu()


def candidates(counts: Tensor, *, count: int, always: Iterable[int]) -> list[int]:
    """The `count` tokens of the largest counts [V], with those of `always` among them, ascending."""
    first = [token for token in dict.fromkeys(always) if 0 <= token < len(counts)]
    by_count = counts.sort(descending=True, stable=True).indices.tolist()
    return sorted(list(dict.fromkeys((*first, *by_count)))[:count])


def coverage(texts: Iterable[Sequence[int]], tokens: Iterable[int]) -> float:
    """The share of the texts' tokens that are among these."""
    among = set(tokens)
    found = [token in among for text in texts for token in text]
    return sum(found) / max(len(found), 1)
