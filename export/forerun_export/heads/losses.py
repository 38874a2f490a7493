"""How a head's law is compared with the target's over the tokens that the head proposes."""

from typing import Any

import torch
from torch import Tensor

_ROWS = 256  # of logits at a time: what a processor's cache holds


class MeanRowCrossEntropy(torch.autograd.Function):
    """log sum_x exp(W_x a) - m a of each row [N], for hidden states a [N,h], a frozen W [n,h] and mean rows m [N,h].

    It is the cross-entropy of softmax(W a) and a law with the mean row m: see `lessons`. Logits are made, used for
    value and gradient, and dropped, a few rows at a time.
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, head: Tensor, mean_rows: Tensor) -> Tensor:
        """The losses; the gradient of their sum by `hidden` is softmax(W a) W - m."""
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), _ROWS):
            rows = slice(start, start + _ROWS)
            a, m = hidden[rows], mean_rows[rows]
            logits = a @ head.T
            law = logits.softmax(-1)
            log_sum = logits.amax(-1).float() - law.amax(-1).float().log()  # of the likeliest token
            losses[rows] = log_sum - (a.float() * m.float()).sum(-1)
            gradient[rows] = law @ head - m
        context.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(context: Any, *outputs: Any) -> tuple[Tensor, None, None]:
        """Rows are independent: each takes its own factor."""
        (gradient,) = context.saved_tensors
        return gradient * outputs[0][:, None].to(gradient.dtype), None, None


def cross_entropy(hidden: Tensor, head: Tensor, mean_rows: Tensor) -> Tensor:
    """See `MeanRowCrossEntropy`."""
    losses: Tensor = MeanRowCrossEntropy.apply(hidden, head, mean_rows)  # type: ignore[no-untyped-call]
    return losses


@torch.no_grad()
def sharper(mean_rows: Tensor, final: Tensor, head: Tensor, *, share: float) -> Tensor:
    """Mean rows [N,h] of the target's laws, after `share` of each was moved to its likeliest token of W's.

    `mean_rows` [N,h] are those of its own laws softmax(W f), `final` [N,h] its f, `head` the W [n,h]. Logits are of the
    type of `head`: of two that are level in bfloat16 either may count as the likelier.
    """
    likeliest = [(rows.to(head.dtype) @ head.T).argmax(-1) for rows in torch.split(final, _ROWS)]
    return torch.lerp(mean_rows.float(), head[torch.cat(likeliest)].float(), share).to(mean_rows.dtype)
