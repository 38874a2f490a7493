"""How a head begins: as another ended, or with the target's last layer behind the best linear guess of what that reads.

What the last layer reads at token t+1 is guessed from the embedding of that token and the target's last hidden state of
token t, by least squares. So the head's first outputs are not noise but already a draft, if a weak one, and
so are those that follow on them: they take the place of last hidden states.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forerun.errors import ExportError
from forerun_export.heads.folder import HeadFolder
from forerun_export.heads.lessons import Lesson
from forerun_export.heads.module import DraftHead, load_weights, rms
from forerun_export.heads.teacher import Teacher

LESSONS = 96
_TOGETHER = 8
_RIDGE = 1e-2  # of the mean square of what is read


def go_on(teacher: Teacher, start: HeadFolder) -> DraftHead:
    """A head as `start` holds it, which may have been trained for another target of the same shape.

    Raises ExportError if it reads other layers, or has other sizes.
    """
    if start.record.feature_layers != teacher.layers:
        raise ExportError(
            f"the head to start from reads layers {_listed(start.record.feature_layers)}, and one for this target "
            f"{_listed(teacher.layers)}; start from a head of a target of the same shape"
        )
    head = DraftHead(teacher.model).float()
    load_weights(head, start.tensors)
    return head.to(teacher.device)


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def begin(teacher: Teacher, lessons: Sequence[Lesson]) -> DraftHead:
    """A head of the teacher's target that has read the first LESSONS of these, but was not trained yet."""
    head = DraftHead(teacher.model).float().to(teacher.device)
    h = teacher.hidden_size
    squares, products = torch.zeros(2 * h, 2 * h), torch.zeros(2 * h, h)
    for inputs, outputs in _pairs(teacher, lessons[:LESSONS]):
        squares += inputs.T @ inputs
        products += inputs.T @ outputs
    ridge = _RIDGE * squares.diagonal().mean() * torch.eye(2 * h)
    with torch.no_grad():
        head.join.weight.copy_(torch.linalg.solve(squares + ridge, products).T)
    return head


def _pairs(teacher: Teacher, lessons: Sequence[Lesson]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each text, what the join reads [N,2h] and what the last layer reads one token later [N,h]."""
    last = len(teacher.model.get_decoder().layers)
    for group in (lessons[start : start + _TOGETHER] for start in range(0, len(lessons), _TOGETHER)):
        tokens = [lesson.example.tokens for lesson in group]
        (before,) = teacher.outputs([one.tolist() for one in tokens], (last - 1,), bfloat16=True)
        for lesson, its_tokens, row in zip(group, tokens, before, strict=True):
            embeddings = rms(teacher.embedding[its_tokens.to(teacher.device)], teacher.epsilon).cpu()
            final = lesson.example.hidden[:, 2 * teacher.hidden_size :].float()
            read = row[: len(its_tokens)].float().cpu()
            since = max(0, lesson.since - 2)
            yield torch.cat((embeddings[1:], final[:-1]), 1)[since:], read[1:][since:]
