"""Decoding with the `generate` of transformers, stamped by a streamer: what both other libraries are measured by."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from forerun_export.bench.runs import Output, Round, Task


class Stamps(BaseStreamer):  # type: ignore[misc]  # transformers publishes no types
    """Keeps the time at which each call of the target gave its tokens. `generate` puts the prompt first."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._prompt_seen = False
        self.rounds: list[Round] = []

    def put(self, value: torch.Tensor) -> None:
        """Tokens have come."""
        if self._prompt_seen:
            self.rounds.append(Round(time.perf_counter() - self._started, value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        """All tokens have come."""


def set_end_tokens(model: Any, end_tokens: Sequence[int]) -> None:
    """Let generation end where forerun's does, and drop a checkpoint's own defaults, which are another law."""
    ends = list(end_tokens)
    model.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0)


def generate(model: Any, task: Task, **more: Any) -> Output:
    """One prompt through `model.generate`, with the whole vocabulary where it samples."""
    prompt = torch.tensor([list(task.tokens)])
    if task.temperature > 0:
        more |= {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(task.seed)
    stamps = Stamps()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=task.max_new_tokens,
        streamer=stamps,
        **more,
    )
    return Output(tuple(output[0, prompt.shape[1] :].tolist()), tuple(stamps.rounds))
