"""Which values of a traced decoder depend on tokens, and which on their places alone.

A *data* value depends on the numbers in `input_ids` or in a cache. A *side* value depends only on shapes and on the
inputs that tell places (`position_ids`, `attention_mask`): sizes, masks, biases, tables of positions. The contract
tells places in another form, so every side value that a data node reads has to be replaced.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export.passes.evaluation import Array

_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_SHAPES_ONLY = {"Shape", "Size"}
_TELL_PLACES = {"attention_mask", "position_ids", "write_indices", "tree_mask"}


@dataclass(frozen=True)
class Run:
    """The sizes of one call: `batch` rows of `new` tokens behind `past` ones."""

    batch: int
    new: int
    past: int

    def feeds(self, inputs: Iterable[ir.Value]) -> dict[ir.Value, Array]:
        """Arrays for inputs of a traced decoder: nothing is padding, tokens and caches are zeros."""
        places = {
            "input_ids": np.zeros((self.batch, self.new), np.int64),
            "attention_mask": np.ones((self.batch, self.past + self.new), np.int64),
            "position_ids": np.tile(np.arange(self.past, self.past + self.new, dtype=np.int64), (self.batch, 1)),
        }
        feeds: dict[ir.Value, Array] = {}
        for value in inputs:
            if value.name in places:
                feeds[value] = places[value.name]
            elif _PAST.fullmatch(str(value.name)):
                _, heads, _, size = past_shape(value)
                feeds[value] = np.zeros((self.batch, heads, self.past, size), np.float32)
        return feeds


def past_inputs(model: ir.Model) -> dict[tuple[int, str], ir.Value]:
    """The concatenated caches: (layer, "key" or "value") -> graph input."""
    found = {}
    for value in model.graph.inputs:
        if match := _PAST.fullmatch(str(value.name)):
            found[int(match[1]), match[2]] = value
    return found


def past_shape(value: ir.Value) -> tuple[None, int, None, int]:
    """The shape [B,H,T,D] of a concatenated cache. Raises ExportError if it is laid out otherwise."""
    shape = value.shape
    if shape is None or len(shape) != 4 or not (isinstance(shape[1], int) and isinstance(shape[3], int)):
        raise ExportError(
            f"the input {value.name} has shape {shape}, where [batch,heads,tokens,head size] is known; "
            "export the model as text-generation-with-past"
        )
    return None, shape[1], None, shape[3]


def data_values(model: ir.Model) -> set[ir.Value]:
    """All data values of the graph."""
    found = {value for value in model.graph.inputs if value.name not in _TELL_PLACES}
    for node in model.graph:
        if node.op_type not in _SHAPES_ONLY and any(source in found for source in node.inputs):
            found.update(node.outputs)
    return found
