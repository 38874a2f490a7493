"""A draft head's graph behind its target's, against the head and the checkpoint in PyTorch.

As in `parity`, the yardstick is float64, and the bound is a multiple of what PyTorch itself is off by in float32.
Entries on the target's features and those on the head's own output are compared alike.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.errors import ExportError
from forerun.manifest import Parity
from forerun_export import eager
from forerun_export.graph_runner import Floats, GraphRunner
from forerun_export.head_files import TrainedHead
from forerun_export.head_runner import HeadRunner
from forerun_export.heads.module import DraftHead, load_weights
from forerun_export.parity import bound, fixed_prompts
from forerun_export.passes.smaller_head import LOWEST
from forerun_export.progress import Report, silent
from forerun_export.reference import Doubles, Prompt
from forerun_export.sources import Source

STEPS = 3
"""Steps of a round that are compared: one on the target's features, and two on the head's own output."""
PIECES = (1, 2, 7)
"""Tokens in a call, beside all of them."""
RAGGED = 3


@dataclass(frozen=True)
class HeadReference:
    """What the head says about some prompts in float64.

    `logits[i][s]` of prompt i: at each entry t, the candidates' logits [N] at step s of a round whose last feature of
    the target's is that of entry t - s. Step 0 has all entries, the others have those from 1 on. `bounds[i]` is what
    rounding explains.
    """

    name: str
    prompts: tuple[Prompt, ...]
    logits: tuple[tuple[Doubles, ...], ...]
    bounds: tuple[float, ...]


def reference(
    head: TrainedHead,
    source: Source,
    *,
    context: int,
    texts: Sequence[Sequence[int]] = (),
    report: Report = silent,
) -> HeadReference:
    """Run the checkpoint and the head behind it. Raises ExportError if either cannot be loaded."""
    size = head.record.target.vocabulary_size
    prompts = [prompt for prompt in fixed_prompts(size, context=context, texts=texts) if prompt.first_position == 0]
    report("running the draft head in PyTorch")
    with eager.quiet():
        model = eager.load_eager(source)
        pair = _Pair(model, head)
        single = [pair.logits(prompt) for prompt in prompts]
        report("running it in float64")
        with pair.double():
            double = [pair.logits(prompt) for prompt in prompts]
    del model, pair
    gc.collect()
    bounds = tuple(
        max(
            bound(float(np.abs(one - other).max()), float(np.abs(other).max()))
            for one, other in zip(*steps, strict=True)
        )
        for steps in zip(single, double, strict=True)
    )
    return HeadReference(eager.reference_name(), tuple(prompts), tuple(double), bounds)


class _Pair:
    """The checkpoint and its head in PyTorch."""

    def __init__(self, model: Any, head: TrainedHead) -> None:
        self._model = model
        self._head = DraftHead(model).eval()
        load_weights(self._head, head.folder.tensors)
        self._tokens = torch.from_numpy(head.tokens.astype(np.int64))
        self._layers = [model.get_decoder().layers[number - 1] for number in head.record.feature_layers]

    def double(self) -> Any:
        """From now on, all in float64."""
        eager.double_while_it_runs(self._model)
        self._head.double()
        return eager.EverythingDouble()

    def logits(self, prompt: Prompt) -> tuple[Doubles, ...]:
        """See `HeadReference.logits`."""
        ids = torch.tensor([prompt.tokens])
        with torch.no_grad():
            hidden = self._hidden(ids)
            embeddings = self._model.get_input_embeddings()(ids[:, 1:]).to(hidden.dtype)
            found = self._head.unroll(hidden[:, :-1], embeddings, steps=STEPS)
            return tuple(self._candidates(self._head.norm(each)) for each in found)

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """[1,T,3h], what the three layers gave."""
        given: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(
                lambda _module, _inputs, output: given.append(output[0] if isinstance(output, tuple) else output)
            )
            for layer in self._layers
        ]
        try:
            self._model.get_decoder()(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat(given, -1)

    def _candidates(self, normed: torch.Tensor) -> Doubles:
        logits: Doubles = self._model.get_output_embeddings()(normed)[0][:, self._tokens].double().numpy()
        return logits


@dataclass(frozen=True)
class _Rows:
    """Logits [rows,V] of the graph, and those [rows,N] of the reference for the same entries of a prompt."""

    way: str
    prompt: int
    logits: Floats
    expected: Doubles


def check(head_path: Path, target_path: Path, tokens: np.ndarray, expected: HeadReference) -> Parity:
    """Run every prompt through both graphs as decoding does, and compare all logits.

    Ways: calls of several lengths; a ragged batch; steps on the head's own output. The result holds the error and
    the bound of the prompt that comes closest to its bound. Raises ExportError if one is over it, or is no number,
    or if another token than the candidates has a logit.
    """
    runner = HeadRunner(GraphRunner(head_path), GraphRunner(target_path))
    found = [(rows.way, rows.prompt, _error(rows, tokens)) for rows in _ways(runner, expected)]
    way, prompt, error = max(found, key=lambda item: item[2] / expected.bounds[item[1]])
    if error > expected.bounds[prompt]:
        raise ExportError(
            f"{head_path} does not compute what its head does: logits differ by {error:.2g} ({way}), "
            f"float32 rounding explains {expected.bounds[prompt]:.2g}; report it"
        )
    return Parity(expected.name, error, expected.bounds[prompt], len({item[:2] for item in found}))


def _error(rows: _Rows, tokens: np.ndarray) -> float:
    """The largest difference; infinite for what is no number, and for a logit that should be LOWEST."""
    error = float(np.abs(rows.logits[:, tokens] - rows.expected).max())
    others = np.delete(rows.logits, tokens, axis=1)
    return error if np.isfinite(error) and (others == np.float32(LOWEST)).all() else float("inf")


def _ways(runner: HeadRunner, expected: HeadReference) -> Iterator[_Rows]:
    for number, (prompt, steps) in enumerate(zip(expected.prompts, expected.logits, strict=True)):
        for length in (*PIECES, len(prompt.tokens)):
            yield _Rows(f"calls of {length} tokens", number, _in_pieces(runner, prompt.tokens, length), steps[0])
        yield from _drafted(runner, number, prompt.tokens, steps)
    yield from _ragged_batch(runner, expected)


def _in_pieces(runner: HeadRunner, tokens: Sequence[int], length: int) -> Floats:
    """Logits [T-1,V] of all entries."""
    caches = runner.new_caches(1, len(tokens))
    pieces = [
        runner.run(caches, [tokens[start : start + length]], [start])[0] for start in range(0, len(tokens), length)
    ]
    return np.concatenate(pieces)[runner.first_place :]


def _drafted(runner: HeadRunner, number: int, tokens: Sequence[int], steps: Sequence[Doubles]) -> Iterator[_Rows]:
    """Rounds that start behind half of a prompt and behind its second token."""
    for known in {2, len(tokens) // 2}:
        caches = runner.new_caches(1, len(tokens))
        runner.run(caches, [tokens[: known - 1]], [0])
        logits = runner.draft(caches, tokens[known - 1 : known - 1 + STEPS], known - 1)
        rows = np.stack([steps[0][known - 2], *(steps[step][known - 3 + step] for step in range(1, STEPS))])
        yield _Rows("steps on the head's own output", number, logits, rows)


def _ragged_batch(runner: HeadRunner, expected: HeadReference) -> Iterator[_Rows]:
    """All prompts but their last tokens in one padded call, then those, each row at its own place."""
    prompts = [prompt.tokens for prompt in expected.prompts]
    prefixes = [len(tokens) - RAGGED for tokens in prompts]
    longest = max(prefixes)
    caches = runner.new_caches(len(prompts), longest + RAGGED)
    runner.run(
        caches,
        [[*tokens[:n], *[0] * (longest - n)] for tokens, n in zip(prompts, prefixes, strict=True)],
        [0] * len(prompts),
    )
    logits = runner.run(caches, [tokens[-RAGGED:] for tokens in prompts], prefixes)
    for row, steps in enumerate(expected.logits):
        yield _Rows("a ragged batch", row, logits[row], steps[0][-RAGGED:])
