"""Draft heads of lookup-table targets: real graphs, whose every proposal depends on features, caches and places.

    feature of token t      (sum of the parts of tokens 0 .. t, part of token 0, 0, 0); a part as in `table_models`
    output of entry t       the same for token t + 1, and how many entries since the last feature of the target's
    slot t of the cache     the part of token t + 1, and whether the entry read a feature of the target's

Features and cache both tell the sum; where they disagree, or where a provisional entry stands for a final one, the
head says something else. Where all is well it gives `table` of the sum: with the target's own table, every proposal
is accepted.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnxscript import BOOL, FLOAT, INT64, script
from onnxscript.onnx_opset import opset24 as op
from onnxscript.values import Opset

from forerun_export.passes.graph_tools import NodeWriter, add_input, nodes_of
from helpers.table_models import TableModel, save_table_graph

FEATURES = 4
"""h: numbers of a feature."""

B, S, R, C, F, M, V, P = "B", "S", "R", "C", "F", "M", "V", "P"  # names of symbolic dimensions


@script(Opset("tests.table_heads", 1), default_opset=op)
def table_head(
    input_ids: INT64[B, S],
    position_ids: INT64[B, S],
    write_indices: INT64[B],
    tree_mask: BOOL[B, S, S],
    logit_rows: INT64[B, R],
    features: FLOAT[B, 1, F, 4],
    feature_rows: INT64[B, S],
    k_cache: FLOAT[B, 2, C, 2],
    v_cache: FLOAT[B, 2, C, 2],
    table: FLOAT[M, V],
    token_weights: FLOAT[V],
    position_weights: FLOAT[P],
) -> tuple[FLOAT[B, R, V], FLOAT[B, 1, R, 4], FLOAT[B, 2, C, 2], FLOAT[B, 2, C, 2]]:
    """The contract of a head."""
    place = op.Min(position_ids + 1, op.Shape(position_weights) - 1)
    part = op.Gather(token_weights, input_ids) * op.Gather(position_weights, place)  # [B,S]
    read = op.GatherND(op.Squeeze(features, [1]), op.Unsqueeze(feature_rows, [-1]), batch_dims=1)  # [B,S,4]
    before, first, steps, _ = op.Split(read, num_outputs=4, axis=-1)  # [B,S,1] each
    own = op.Unsqueeze(part, [-1])
    final = op.Cast(steps == 0.0, to=FLOAT.dtype)
    k = op.Tile(op.Unsqueeze(op.Concat(own, final, axis=-1), [1]), [1, 2, 1, 1])
    k_cache_out = op.TensorScatter(k_cache, k, write_indices, axis=2)
    v_cache_out = op.TensorScatter(v_cache, k + 1.0, write_indices, axis=2)

    slots = op.Range(0, op.Squeeze(op.Shape(k_cache, start=2, end=3)), 1)
    offset = op.Unsqueeze(op.Unsqueeze(slots, [0]) - op.Unsqueeze(write_indices, [1]), [1])  # [B,1,C]
    width = op.Squeeze(op.Shape(input_ids, start=1))
    clipped = op.Expand(op.Clip(offset, 0, width - 1), op.Concat([1], op.Shape(input_ids, start=1), [1], axis=0))
    among_new = op.And(op.And(offset >= 0, offset < width), op.GatherElements(tree_mask, clipped, axis=2))
    visible = op.Unsqueeze(op.Or(offset < 0, among_new), [-1])  # [B,S,C,1]
    held = op.Gather(k_cache_out + v_cache_out, 0, axis=1) * 0.5 - 0.5  # [B,C,2]
    sums = op.ReduceSum(op.Where(visible, op.Unsqueeze(held, [1]), 0.0), [2], keepdims=0)  # [B,S,2]
    seen, finals = op.Split(sums, num_outputs=2, axis=-1)

    after = before + own
    wrong = 7.0 * (after - seen - first)
    position = op.Unsqueeze(op.Cast(position_ids, to=FLOAT.dtype), [-1])
    wrong = wrong + 13.0 * (finals - (position + 1.0 - steps))
    code = op.Mod(op.Cast(op.Squeeze(after + wrong, [-1]), to=INT64.dtype), op.Shape(table, end=1))
    logits = op.Gather(table, op.GatherElements(code, logit_rows, axis=1))
    output = op.Concat(after, first, steps + 1.0, steps * 0.0, axis=-1)  # [B,S,4]
    hidden = op.Unsqueeze(op.GatherND(output, op.Unsqueeze(logit_rows, [-1]), batch_dims=1), [1])
    return logits, hidden, k_cache_out, v_cache_out


@functools.cache
def _table_head_proto() -> object:
    return table_head.to_model_proto()


@dataclass(frozen=True, eq=False)
class TableHead(TableModel):
    """A head; `logits` gives its law where it reads features that are right, after two tokens or more."""

    def save(self, folder: Path, *, keeps_features: bool = False) -> None:
        """Write model.onnx and model.onnx.data."""
        save_table_graph(ir.from_proto(_table_head_proto()), self, folder)


def head_of(model: TableModel) -> TableHead:
    """The head that says what this model says."""
    return TableHead(model.table, model.token_weights, model.position_weights)


def keep_features(model: ir.Model) -> None:
    """Let a lookup-table target keep features."""
    (total,) = (node.inputs[0] for node in nodes_of(model, "Cast"))  # [B,S]
    (mod,) = nodes_of(model, "Mod")
    parts = next(node for node in nodes_of(model, "Where")).inputs[1]  # [B,1,C]
    cache = add_input(model, "feature_cache", ir.DataType.FLOAT, ["B", 1, "C", FEATURES])
    write = next(value for value in model.graph.inputs if value.name == "write_indices")
    with NodeWriter(model.graph, before=mod) as w:
        column = w.op("Unsqueeze", total, w.integers(-1))
        nothing = w.op("Mul", column, w.scalar(0.0))
        first = w.op("Add", nothing, w.op("Slice", parts, w.integers(0), w.integers(1), w.integers(2)))
        feature = w.op("Concat", column, first, nothing, nothing, axis=-1)
        new = w.op("Unsqueeze", feature, w.integers(1))
        written = w.op("TensorScatter", cache, new, write, axis=2, name="feature_cache_out")
    written.type, written.shape = cache.type, cache.shape
    model.graph.outputs.append(written)
