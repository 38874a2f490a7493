"""How a head begins: its layer is the target's last one, and its join the best linear guess of what that layer reads.

What the last layer reads at token t+1 is guessed from the embedding of that token and the target's last hidden state of
token t, by least squares. So the head's first outputs are not noise but already a draft, if a weak one, and
so are those that follow on them: they take the place of last hidden states.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forerun_export.heads.features import Example
from forerun_export.heads.module import DraftHead, rms
from forerun_export.heads.teacher import Teacher

EXAMPLES = 96
_TOGETHER = 8
_RIDGE = 1e-2  # of the mean square of what is read


def begin(teacher: Teacher, examples: Sequence[Example]) -> DraftHead:
    """A head of the teacher's target that has read the first EXAMPLES of these, but was not trained yet."""
    head = DraftHead(teacher.model).float().to(teacher.device)
    h = teacher.hidden_size
    squares, products = torch.zeros(2 * h, 2 * h), torch.zeros(2 * h, h)
    for inputs, outputs in _pairs(teacher, examples[:EXAMPLES]):
        squares += inputs.T @ inputs
        products += inputs.T @ outputs
    ridge = _RIDGE * squares.diagonal().mean() * torch.eye(2 * h)
    with torch.no_grad():
        head.join.weight.copy_(torch.linalg.solve(squares + ridge, products).T)
    return head


def _pairs(teacher: Teacher, examples: Sequence[Example]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each answer, what the join reads [N,2h] and what the last layer reads one token later [N,h]."""
    last = len(teacher.model.get_decoder().layers)
    for group in (examples[start : start + _TOGETHER] for start in range(0, len(examples), _TOGETHER)):
        (before,) = teacher.outputs([example.tokens.tolist() for example in group], (last - 1,), bfloat16=True)
        for example, row in zip(group, before, strict=True):
            embeddings = rms(teacher.embedding[example.tokens.to(teacher.device)], teacher.epsilon).cpu()
            final = example.hidden[:, 2 * teacher.hidden_size :].float()
            read = row[: len(example.tokens)].float().cpu()
            since = max(0, example.begins - 2)
            yield torch.cat((embeddings[1:], final[:-1]), 1)[since:], read[1:][since:]
