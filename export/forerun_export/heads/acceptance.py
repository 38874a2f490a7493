"""How far drafted tokens would be the target's, or accepted, on held-out answers.

Matches of an example are bool [steps,P]: whether the token drafted at step s of a round that begins at place i of the
answer is the target's most likely one. Overlaps are float [steps,P]: sum min(p, q) there, at temperature 1. Both hold
where everything drafted before in that round is the text's own, which is what a round needs to come this far.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun_export.heads.features import Example
from forerun_export.heads.folder import HeadFigures
from forerun_export.heads.module import DraftHead
from forerun_export.heads.teacher import Teacher

_ROWS = 512


@dataclass(frozen=True)
class Found:
    """Of one example with P answer tokens: matches [steps,P] or, of a sampled one, overlaps [steps,P].

    Entries beyond the answer's end are NaN.
    """

    temperature: float
    values: Tensor


Drafting = Callable[[Example, int], Tensor]
"""What a way of drafting finds on an example in so many steps: the values of `Found`."""


def measure(examples: Sequence[Example], drafting: Drafting, *, steps: int) -> Mapping[str, HeadFigures]:
    """The figures of each kind of example: greedy match on answers decoded greedily, overlap on sampled ones."""
    by_kind = defaultdict(list)
    for example in examples:
        by_kind[example.kind].append(Found(example.temperature, drafting(example, steps)))
    return {kind: _figures(found, steps) for kind, found in sorted(by_kind.items())}


def _figures(found: Sequence[Found], steps: int) -> HeadFigures:
    greedy = [one.values for one in found if one.temperature == 0]
    sampled = [one.values for one in found if one.temperature > 0]
    tokens = tuple(round(tokens_a_call(greedy, length), 3) for length in range(1, steps + 1)) if greedy else ()
    return HeadFigures(_means(greedy), _means(sampled), tokens)


def _means(values: Sequence[Tensor]) -> tuple[float, ...]:
    if not values:
        return ()
    return tuple(round(float(mean), 4) for mean in torch.cat(list(values), 1).nanmean(1))


def tokens_a_call(matches: Sequence[Tensor], length: int) -> float:
    """Mean tokens that a call of the target gives, with `length` drafted each time: texts are walked as decoded."""
    tokens = calls = 0
    for matched in matches:
        runs = matched[:length].nan_to_num(0).cumprod(0).sum(0).int().tolist()
        place = 0
        while place < len(runs):
            accepted = min(runs[place] + 1, len(runs) - place)
            tokens, calls, place = tokens + accepted, calls + 1, place + accepted
    return tokens / max(calls, 1)


class HeadDrafting:
    """Drafting with a head that proposes `tokens` [n]."""

    def __init__(self, head: DraftHead, teacher: Teacher, tokens: Tensor) -> None:
        self._head, self._teacher, self._tokens = head, teacher, tokens
        self._rows = teacher.head[tokens]

    @torch.no_grad()
    def __call__(self, example: Example, steps: int) -> Tensor:
        """See `Drafting`."""
        teacher = self._teacher
        first = max(1, example.begins - 1)  # the entry of the prompt's last token
        hidden = example.hidden[None, :-2].to(teacher.device).float()
        embeddings = teacher.embedding[example.tokens[None, 1:-1].to(teacher.device)]
        outputs = self._head.unroll(hidden, embeddings, steps=steps, first=first)
        laws = Laws.of(teacher, example)
        values = torch.full((steps, len(laws)), torch.nan)
        for step, output in enumerate(outputs):
            # Place i of the answer is what entry begins - 2 + i predicts; a round that begins at i is at i + step.
            a = self._head.norm(output[0, example.begins - 2 + step - (first if step else 0) :])
            if len(a):
                logits = a @ self._rows.T
                values[step, : len(a)] = laws.compare(logits, self._tokens, example.temperature, since=step)
        return values


class Laws:
    """The target's laws of P places, from its final hidden states [P,h]; computed once, in rows that fit."""

    def __init__(self, teacher: Teacher, final: Tensor) -> None:
        self.logits = torch.cat([rows @ teacher.head.T for rows in torch.split(final, _ROWS)])

    @classmethod
    def of(cls, teacher: Teacher, example: Example) -> "Laws":
        """Of every place of an example's answer."""
        hidden = example.hidden[example.begins - 1 : -1].to(teacher.device)
        return cls(teacher, teacher.final(hidden))

    def __len__(self) -> int:
        return len(self.logits)

    def compare(self, draft: Tensor, tokens: Tensor | None, temperature: float, *, since: int = 0) -> Tensor:
        """Matches or overlaps [N] of logits over `tokens` (None: all) [N,n] with the places from `since` on."""
        target = self.logits[since : since + len(draft)]
        if temperature == 0:
            best = draft.argmax(-1)
            return ((best if tokens is None else tokens[best]) == target.argmax(-1)).float()
        p = target.softmax(-1)
        return torch.minimum(p if tokens is None else p[:, tokens], draft.softmax(-1)).sum(-1)
