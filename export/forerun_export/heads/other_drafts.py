"""Drafts that need no training, measured on the same answers as a head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.suffixes import SuffixAutomaton
from forerun_export.heads.acceptance import Laws
from forerun_export.heads.features import Example
from forerun_export.heads.teacher import Teacher


class LayersOutDrafting:
    """Drafting with the target less some layers (from 0). It reads the text itself: a step is as good as the first."""

    def __init__(self, teacher: Teacher, layers: Sequence[int]) -> None:
        self._teacher, self._layers = teacher, layers

    @torch.no_grad()
    def __call__(self, example: Example, steps: int) -> Tensor:
        """See `acceptance.Drafting`."""
        final = self._teacher.final_without(self._layers, example.tokens.tolist())[example.begins - 1 : -1]
        draft = Laws(self._teacher, final).logits
        same = Laws.of(self._teacher, example).compare(draft, None, example.temperature)
        values = torch.full((steps, len(same)), torch.nan)
        for step in range(min(steps, len(same))):
            values[step, : len(same) - step] = same[step:]
        return values


class NgramDrafting:
    """Drafting with what followed when the text last went as it goes now; where nothing did, nothing is accepted."""

    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher

    @torch.no_grad()
    def __call__(self, example: Example, steps: int) -> Tensor:
        """See `acceptance.Drafting`."""
        laws, tokens = Laws.of(self._teacher, example), example.tokens.tolist()
        automaton = SuffixAutomaton()
        for token in tokens[: example.begins]:
            automaton.append(token)
        values = torch.full((steps, len(laws)), torch.nan)
        for place, token in enumerate(tokens[example.begins :]):
            continuation = automaton.continuation()
            for step in range(min(steps, len(laws) - place)):
                proposed = next(continuation, None)
                logits = laws.logits[place + step]
                values[step, place] = 0.0 if proposed is None else _value(logits, proposed.token, example.temperature)
                if proposed is None or proposed.token != tokens[example.begins + place + step]:
                    break
            automaton.append(token)
        return values


def _value(logits: Tensor, token: int, temperature: float) -> float:
    return float(logits.argmax() == token) if temperature == 0 else float(logits.softmax(-1)[token])
