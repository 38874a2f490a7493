"""What a model's products read: the largest |x| of each input channel, on a fixed text.

`smoothing` shares the roughness of activations out by it. The text is not the one that quality is told by.
"""

from collections.abc import Mapping, Sequence
from importlib import resources

import numpy as np
import onnx_ir as ir

from forerun_export.graph_runner import Floats
from forerun_export.head_runner import Runner
from forerun_export.passes.graph_tools import NodeWriter, nodes_of
from forerun_export.passes.int8_weights import initializer_of, is_constant
from forerun_export.quality import CHUNK

PREFIX = "largest_input."
"""Of a graph output's name: behind it is the name of the weight."""


def text() -> str:
    """The fixed text."""
    return resources.files(__package__).joinpath("calibration_text.txt").read_text("utf-8")


def observe(model: ir.Model) -> None:
    """Add an output for each product with a weight: max |x| [K] over all rows of its input x [B,S,K]."""
    for node in nodes_of(model, "MatMul"):
        if not is_constant(node.inputs[1]):
            continue
        source = initializer_of(node.inputs[1])
        assert source is not None
        with NodeWriter(model.graph, before=node) as w:
            name = f"{PREFIX}{source.name}"
            largest = w.op("ReduceMax", w.op("Abs", node.inputs[0]), w.integers(0, 1), keepdims=0, name=name)
        largest.type, largest.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["K"])
        model.graph.outputs.append(largest)


def largest_inputs(runner: Runner, pieces: Sequence[Sequence[int]]) -> Mapping[str, Floats]:
    """By weight, the largest |x| [K] of each input channel over all tokens of the pieces."""
    found: dict[str, Floats] = {}
    for piece in pieces:
        caches = runner.new_caches(1, len(piece))
        for start in range(0, len(piece), CHUNK):
            outputs = runner.observe(caches, [piece[start : start + CHUNK]], [start])
            for name, largest in outputs.items():
                if name.startswith(PREFIX):
                    weight = name.removeprefix(PREFIX)
                    found[weight] = np.maximum(found.get(weight, largest), largest)
    return found
