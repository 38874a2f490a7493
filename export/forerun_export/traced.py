"""A graph that was exported before, run as it is: what the converted one is compared with, without PyTorch.

There is no float64 of it. The yardstick is each prompt in one call, and what float32 may cost is seen from the same
prompt read token by token, which sums in another order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime

from forerun_export.frontends.optimum import load
from forerun_export.passes import fixed_sizes, tidy
from forerun_export.passes.drop_layers import residual_stream
from forerun_export.passes.evaluation import Array, Piece
from forerun_export.passes.graph_tools import drop_unused, replace_output
from forerun_export.passes.sides import Run, past_inputs
from forerun_export.progress import Report, silent
from forerun_export.reference import Doubles, Prompt, Reference
from forerun_export.sources import GRAPH_NAME, Source


def traced_references(
    source: Source,
    prompts: Sequence[Prompt],
    *,
    variants: Sequence[tuple[int, ...]] = ((),),
    report: Report = silent,
) -> Mapping[tuple[int, ...], Reference]:
    """The reference of the graph with each tuple of layers in `variants` left out.

    Raises ExportError if it cannot be run.
    """
    report("running the graph as it was given")
    name = f"{GRAPH_NAME} as given, onnxruntime {onnxruntime.__version__}, float32"
    found = {}
    for variant in variants:
        traced = _Traced(_without_layers(load(source.path / GRAPH_NAME), variant))
        placed = [prompt if traced.takes_positions else replace(prompt, first_position=0) for prompt in prompts]
        whole = [traced.logits(prompt, [len(prompt.tokens)]) for prompt in placed]
        single = [traced.logits(prompt, [1] * len(prompt.tokens)) for prompt in placed]
        rounding = [float(np.abs(a - b).max()) for a, b in zip(whole, single, strict=True)]
        found[variant] = Reference(name, tuple(placed), tuple(whole), tuple(rounding))
    return found


class _Traced:
    """The graph with its growing caches."""

    def __init__(self, model: ir.Model) -> None:
        self._past = past_inputs(model)
        outputs = {str(value.name): value for value in model.graph.outputs}
        presents = [outputs[f"present.{layer}.{kind}"] for layer, kind in self._past]
        self._piece = Piece(model, [outputs["logits"], *presents])
        self.takes_positions = any(value.name == "position_ids" for value in model.graph.inputs)

    def logits(self, prompt: Prompt, lengths: Sequence[int]) -> Doubles:
        """Logits [T,V] of a prompt that is read in calls of the given lengths."""
        return np.concatenate(list(self._calls(prompt, lengths))).astype(np.float64)

    def _calls(self, prompt: Prompt, lengths: Sequence[int]) -> Iterator[Array]:
        caches: dict[ir.Value, Array] = {}
        done = 0
        for length in lengths:
            feeds = Run(batch=1, new=length, past=done).feeds(self._piece.inputs)
            for value in feeds:
                if value.name == "input_ids":
                    feeds[value] = np.array([prompt.tokens[done : done + length]], np.int64)
                elif value.name == "position_ids":
                    feeds[value] = feeds[value] + prompt.first_position
            logits, *presents = self._piece.run(feeds | caches)
            caches = dict(zip(self._past.values(), presents, strict=True))
            done += length
            yield logits[0]


def _without_layers(model: ir.Model, left_out: tuple[int, ...]) -> ir.Model:
    if left_out:
        tidy.apply(model)
        fixed_sizes.apply(model, context=64)
        stream = residual_stream(model, len(past_inputs(model)) // 2)
        for layer in sorted(left_out):
            replace_output(stream[2 * layer + 2], stream[2 * layer])
            stream[2 * layer + 2] = stream[2 * layer]
        drop_unused(model)
    return model
