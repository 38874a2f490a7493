"""What training sees of a text: the target's hidden states, and what the loss has to know of the target's laws.

The loss is the cross-entropy of the target's law p and the head's law over the tokens that the head proposes, with W
their rows of the target's head:

    -sum_x p(x) log softmax(W a)(x) = log sum_x exp(W_x a) - m a,    m = sum_x p(x) W_x

So a law enters by its mean row m alone. These are computed once, in float32.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun_export.heads.features import Example
from forerun_export.heads.row_file import BYTES, RowFile, tokens_key
from forerun_export.heads.teacher import Teacher
from forerun_export.progress import Report, silent
from forerun_export.writer import require_space

_ROWS = 1024  # of logits at a time


@dataclass(frozen=True)
class Lesson:
    """An example, the mean rows [T,h] of the laws behind its tokens, and the first token that is to be learnt."""

    example: Example
    mean_rows: Tensor
    since: int


def lessons(
    teacher: Teacher, tokens: Tensor, examples: Sequence[Example], folder: Path, *, report: Report = silent
) -> list[Lesson]:
    """A lesson of each example, with the laws over `tokens` [n]; mean rows that the folder lacks are computed now.

    Prompts are learnt as well as answers, from where they differ: what all have in common is the chat template's.
    """
    since = max(2, _common([one.tokens[: one.begins].tolist() for one in examples]))  # 2: the first entry's token
    rows = RowFile(folder, f"mean-rows-{tokens_key(tokens.tolist())}-{since}", teacher.hidden_size)
    lacking = [one for one in examples if one.key not in rows]
    size = sum(len(one.tokens) for one in lacking) * teacher.hidden_size * BYTES
    require_space(folder, size, other_place="use another --work")
    for done, one in enumerate(lacking, len(examples) - len(lacking) + 1):
        rows.add(one.key, mean_rows(teacher, tokens, one.hidden, since=since - 1))
        if done % 64 == 0 or done == len(examples):
            report("Reading laws", done, len(examples))
    return [Lesson(one, rows.read(one.key), since) for one in examples]


@torch.no_grad()
def mean_rows(teacher: Teacher, tokens: Tensor, hidden: Tensor, *, since: int = 0) -> Tensor:
    """The mean rows [T,h] in float16 of the laws behind hidden states [T,3h]; zeros before the entry `since`."""
    head = teacher.head[tokens].float()
    found = torch.zeros(len(hidden), teacher.hidden_size, dtype=torch.float16)
    for start in range(since, len(hidden), _ROWS):
        # In float32: two logits of a bfloat16 product are often level.
        law = (teacher.final(hidden[start : start + _ROWS].to(teacher.device)) @ head.T).softmax(-1)
        found[start : start + _ROWS] = (law @ head).half().cpu()
    return found


def _common(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))
