"""How a head's law is compared with the target's over the tokens that the head proposes."""

from typing import Any

import torch
from torch import Tensor

_ROWS = 256  # of logits at a time: what a processor's cache holds


class SoftCrossEntropy(torch.autograd.Function):
    """-sum_x p(x) log softmax(W a)(x) of each row [N], for hidden states a [N,h], a frozen W [n,h] and laws p [N,n].

    Logits are made, used for value and gradient, and dropped, a few rows at a time.
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, head: Tensor, laws: Tensor) -> Tensor:
        """The losses; the gradient of their sum by `hidden` is (softmax(W a) - p) W."""
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), _ROWS):
            rows = slice(start, start + _ROWS)
            p = laws[rows]
            logits = (hidden[rows] @ head.T).float()
            log_q = logits.log_softmax(-1)
            losses[rows] = -(p.float() * log_q).sum(-1)
            gradient[rows] = (log_q.exp_() - p).to(hidden.dtype) @ head
        context.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(context: Any, *outputs: Any) -> tuple[Tensor, None, None]:
        """Rows are independent: each takes its own factor."""
        (gradient,) = context.saved_tensors
        return gradient * outputs[0][:, None].to(gradient.dtype), None, None


def soft_cross_entropy(hidden: Tensor, head: Tensor, laws: Tensor) -> Tensor:
    """See `SoftCrossEntropy`."""
    losses: Tensor = SoftCrossEntropy.apply(hidden, head, laws)  # type: ignore[no-untyped-call]
    return losses
