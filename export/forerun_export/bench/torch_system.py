"""The checkpoint in PyTorch as transformers runs it: eagerly, with its default attention, alone or assisted."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from forerun_export.bench.generating import generate, set_end_tokens
from forerun_export.bench.runs import Output, Task
from forerun_export.eager import load_eager
from forerun_export.sources import resolve


class TorchSystem:
    """A float32 model; with `assistant` (a checkpoint) or `left_out` (layers) transformers' assisted generation.

    The assistant keeps its library's defaults: up to 20 tokens a round, as long as it is 40% sure of each.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        threads: int,
        end_tokens: Sequence[int],
        assistant: str | None = None,
        left_out: Sequence[int] = (),
    ) -> None:
        torch.set_num_threads(threads)
        self._model = _load(checkpoint, end_tokens)
        self._more: dict[str, Any] = {}
        if assistant is not None:
            self._more = {"assistant_model": _load(assistant, end_tokens)}
        elif left_out:
            self._more = {"assistant_model": without_layers(self._model, left_out)}

    def decode(self, task: Task) -> Output:
        """See `System.decode`."""
        return generate(self._model, task, **self._more)

    def profile(self) -> None:
        """See `System.profile`."""


def _load(checkpoint: str, end_tokens: Sequence[int]) -> Any:
    model = load_eager(resolve(checkpoint))
    model.set_attn_implementation("sdpa")  # what from_pretrained takes by default; load_eager wants the plain formula
    set_end_tokens(model, end_tokens)
    return model


def without_layers(model: Any, left_out: Sequence[int]) -> Any:
    """A model of the other layers, which shares their weights with `model`."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    smaller = copy.deepcopy(model, shared)
    decoder = smaller.get_decoder()
    kept = [layer for number, layer in enumerate(decoder.layers) if number not in left_out]
    for number, layer in enumerate(kept):
        layer.self_attn.layer_idx = number  # its place in the cache
    decoder.layers = torch.nn.ModuleList(kept)
    smaller.config.num_hidden_layers = len(kept)
    if types := getattr(smaller.config, "layer_types", None):
        smaller.config.layer_types = [kind for number, kind in enumerate(types) if number not in left_out]
    return smaller
