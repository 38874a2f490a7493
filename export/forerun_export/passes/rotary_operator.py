"""Rotary positions spelled out, x * cos + rotate_half(x) * sin, as the operator RotaryEmbedding (Su et al. 2104.09864).

rotate_half(x) is the second half of x, negated, before the first half. The operator reads one half of each table, so
the two halves of a table must be the same.
"""

import numpy as np
import onnx_ir as ir

from forerun_export.passes.graph_tools import (
    NodeWriter,
    Outcome,
    constant,
    drop_unused,
    nodes_of,
    producer,
    replace_output,
    weight,
)


def apply(model: ir.Model) -> Outcome:
    """Rewrite every such sum over x [B,heads,S,D]."""
    count = sum(_rewrite(model, node) for node in nodes_of(model, "Add"))
    drop_unused(model)
    return Outcome(bool(count), "" if count else "no sum x * cos + rotate_half(x) * sin was found")


def _rewrite(model: ir.Model, node: ir.Node) -> bool:
    plain, rotated = (producer(value, "Mul") for value in node.inputs)
    if plain is None or rotated is None:
        return False
    cosines, sines = _lookup(plain.inputs[1]), _lookup(rotated.inputs[1])
    source, half = plain.inputs[0], _half_rotated(rotated.inputs[0], plain.inputs[0])
    if source is None or cosines is None or sines is None or half is None:
        return False
    tables = [_half(model, lookup, half) for lookup in (cosines, sines)]
    if None in tables:
        return False
    with NodeWriter(model.graph, before=node) as w:
        turned = w.op("RotaryEmbedding", source, *tables, cosines.inputs[1])
    replace_output(node.outputs[0], turned)
    return True


def _lookup(value: ir.Value | None) -> ir.Node | None:
    """The Gather by position_ids behind Unsqueeze(.., 1): a table [B,1,S,D]."""
    view = producer(value, "Unsqueeze")
    axes = weight(view.inputs[1]) if view is not None else None
    if view is None or axes is None or axes.numpy().tolist() != [1]:
        return None
    lookup = producer(view.inputs[0], "Gather")
    ids = lookup.inputs[1] if lookup is not None else None
    return lookup if ids is not None and ids.name == "position_ids" else None


def _half_rotated(value: ir.Value | None, source: ir.Value | None) -> int | None:
    """D/2 if `value` is Concat(-source[D/2:], source[:D/2]) along the last axis."""
    joined = producer(value, "Concat")
    if joined is None or len(joined.inputs) != 2 or joined.attributes.get_int("axis", 0) not in (-1, 3):
        return None
    negated = producer(joined.inputs[0], "Neg")
    second = producer(negated.inputs[0] if negated else None, "Slice")
    first = producer(joined.inputs[1], "Slice")
    if first is None or second is None or first.inputs[0] is not source or second.inputs[0] is not source:
        return None
    low, high = _bounds(first), _bounds(second)
    if low is None or high is None or low[0] != 0 or low[1] != high[0] or high[1] < 2 * low[1]:
        return None
    return low[1]


def _bounds(node: ir.Node) -> tuple[int, int] | None:
    """Start and end of a Slice with step 1 along the last axis of four."""
    numbers = [weight(value) for value in node.inputs[1:]]
    if len(numbers) < 3 or any(tensor is None or tensor.size != 1 for tensor in numbers):
        return None
    start, end, axis, *step = (int(tensor.numpy().item()) for tensor in numbers if tensor is not None)
    return (start, end) if axis in (3, -1) and step in ([], [1]) else None


def _half(model: ir.Model, lookup: ir.Node, half: int) -> ir.Value | None:
    """The first half of a table [positions,D], if the second half is the same."""
    table = weight(lookup.inputs[0])
    if table is None:
        return None
    numbers = table.numpy()
    if numbers.shape[-1] != 2 * half or not np.array_equal(numbers[:, :half], numbers[:, half:]):
        return None
    return constant(model.graph, f"{table.name}.half", np.ascontiguousarray(numbers[:, :half]))
