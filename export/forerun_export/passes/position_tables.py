"""What a traced graph computes from the tokens' positions, as tables that are looked up by `position_ids`.

Rotary angles, learned positions and the like are side values: with `n` tokens at positions 0, 1, .. the graph gives a
row for each, and that must be the row which it gives for the same position in any other call. Cosines of a whole
call at once would also differ in the last bits from those of single tokens; a table does not.

Position ids may run up to `context + MARGIN` (exclusive) on padding rows, where a table repeats its last row.
"""

import numpy as np
import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export.passes.evaluation import Array, Piece
from forerun_export.passes.graph_tools import NodeWriter, Outcome, add_input, constant, drop_unused, weight
from forerun_export.passes.rotary_tables import MARGIN
from forerun_export.passes.sides import Run, data_values

# Views that only add dimensions of one: the table is made of what is behind them.
_VIEWS = {"Unsqueeze"}


def apply(model: ir.Model, *, context: int) -> Outcome:
    """Make a table of every side value that a data node reads. Raises ExportError for one that is none."""
    values = _read_by_data(model)
    if not values:
        return Outcome(False, "no value that data nodes read depends on positions")
    positions = add_input(model, "position_ids", ir.DataType.INT64, ["B", "S"])
    for number, value in enumerate(values):
        table = _table(model, value, context)
        rows = np.concatenate([table, np.repeat(table[-1:], MARGIN, axis=0)])
        source = constant(model.graph, f"positions.{number}", np.ascontiguousarray(rows))
        with NodeWriter(model.graph, before=next(iter(model.graph))) as w:
            looked_up = w.op("Gather", source, positions)
        value.replace_all_uses_with(looked_up)
    drop_unused(model)
    return Outcome(True)


def _read_by_data(model: ir.Model) -> list[ir.Value]:
    """The computed side values that data nodes read, without the views on them."""
    data, found = data_values(model), []
    for node in model.graph:
        if not any(output in data for output in node.outputs):
            continue
        for value in node.inputs:
            if value is None or value in data or value.producer() is None or _is_transposed_weight(value):
                continue
            while (view := value.producer()) is not None and view.op_type in _VIEWS:
                value = view.inputs[0]
                assert value is not None
            found.append(value)
    return [value for value in dict.fromkeys(found) if not _of_the_contract(model, value)]


def _of_the_contract(model: ir.Model, value: ir.Value) -> bool:
    """Whether it is made of the contract's inputs already: a mask that is written."""
    return any(leaf.name in ("write_indices", "tree_mask") for leaf in Piece(model, [value]).inputs)


def _is_transposed_weight(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Transpose" and weight(node.inputs[0]) is not None


def _table(model: ir.Model, value: ir.Value, context: int) -> Array:
    """Rows [context, ..] of the value by position, proven in other calls."""
    piece = Piece(model, [value])
    unknown = sorted(str(leaf.name) for leaf in piece.inputs if not leaf.is_graph_input())
    if unknown:
        raise ExportError(f"{value.name} depends on {unknown[0]}; use another front end")
    table = _rows(piece, value, Run(batch=1, new=context, past=0))
    half, last = context // 2, context - 1
    for run in (
        Run(batch=2, new=min(3, context), past=0),
        Run(batch=1, new=context - half, past=half),
        Run(batch=2, new=1, past=last),
    ):
        rows = _rows(piece, value, run)
        if not np.allclose(rows, table[run.past : run.past + run.new], rtol=1e-5, atol=1e-6):
            raise _refusal(
                value, f"it is another for {run.new} tokens behind {run.past} than for all {context} at once"
            )
    _prove_by_position(piece, value, table)
    return table


def _rows(piece: Piece, value: ir.Value, run: Run) -> Array:
    """The value as [S, ..] for the first row of the batch."""
    return _by_token(piece.run(run.feeds(piece.inputs))[0], value, run)


def _by_token(array: Array, value: ir.Value, run: Run) -> Array:
    if array.ndim < 2 or array.shape[0] not in (1, run.batch) or array.shape[1] != run.new:
        raise _refusal(value, f"its shape {list(array.shape)} is not [batch,tokens,..] for {run.new} tokens")
    first: Array = array[0]
    return first


def _prove_by_position(piece: Piece, value: ir.Value, table: Array) -> None:
    """Where the graph reads position_ids, a token's row follows its position and not its place in the call."""
    ids = next((leaf for leaf in piece.inputs if leaf.name == "position_ids"), None)
    if ids is None:
        return
    run = Run(batch=1, new=min(4, len(table)), past=0)
    order = np.arange(run.new)[::-1] * ((len(table) - 1) // max(run.new - 1, 1))
    found = _by_token(piece.run({**run.feeds(piece.inputs), ids: order[None].astype(np.int64)})[0], value, run)
    if not np.allclose(found, table[order], rtol=1e-5, atol=1e-6):
        raise _refusal(value, "it does not follow position_ids")


def _refusal(value: ir.Value, why: str) -> ExportError:
    return ExportError(
        f"{value.name} depends on places but is no table by position ({why}); choose another model or front end"
    )
