"""Cosine and sine tables cut to the positions that can occur.

Position ids may run up to `context + MARGIN` (exclusive) on padding rows; a table that is shorter repeats its last
row there, which nothing that is kept ever reads.
"""

import numpy as np
import onnx_ir as ir

from forerun_export.passes.graph_tools import Outcome, derived_weight, nodes_of, register, sizes, weight

MARGIN = 16
"""Positions past the context that padding rows may name."""


def apply(model: ir.Model, *, context: int) -> Outcome:
    """Cut every table that is looked up by `position_ids` to `context + MARGIN` rows."""
    rows = context + MARGIN
    tables = {
        node.inputs[0]
        for node in nodes_of(model, "Gather")
        if node.inputs[1] is not None and node.inputs[1].name == "position_ids"
    }
    changed = [table for table in tables if table is not None and _resize(model, table, rows)]
    return Outcome(bool(changed), "" if changed else "no table is looked up by position_ids, or all fit already")


def _resize(model: ir.Model, table: ir.Value, rows: int) -> bool:
    tensor = weight(table)
    if tensor is None or sizes(tensor)[0] == rows:
        return False

    def cut(array: np.ndarray) -> np.ndarray:
        missing = max(0, rows - len(array))
        return np.concatenate([array[:rows], np.repeat(array[-1:], missing, axis=0)])

    name = str(table.name)
    shape = [rows, *sizes(tensor)[1:]]
    del model.graph.initializers[name]
    table.name = f"{name}.untrimmed"
    table.replace_all_uses_with(register(model.graph, derived_weight(name, shape, [tensor], cut)))
    return True
