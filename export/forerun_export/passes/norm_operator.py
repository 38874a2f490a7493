"""Root-mean-square norms spelled out, x / sqrt(mean(x^2) + epsilon) * scale, as the operator RMSNormalization.

The mean over a row that ReduceMean computes may depend, in its last bits, on how many rows a call has.
"""

import onnx_ir as ir

from forerun_export.passes.graph_tools import (
    NodeWriter,
    Outcome,
    drop_unused,
    nodes_of,
    only_consumer,
    producer,
    replace_output,
    weight,
)


def apply(model: ir.Model) -> Outcome:
    """Rewrite every such norm over the last axis."""
    means = nodes_of(model, "ReduceMean")
    count = sum(_rewrite(model, node) for node in means)
    drop_unused(model)
    return Outcome(bool(count), "" if count else f"none of {len(means)} means over a row is part of a norm")


def _rewrite(model: ir.Model, mean: ir.Node) -> bool:
    square = producer(mean.inputs[0], "Pow")
    if square is None or _number(square.inputs[1]) != 2 or not _over_last_axis(mean):
        return False
    source = square.inputs[0]
    added = _reader(mean, "Add")
    root = _reader(added, "Sqrt")
    epsilon = next((n for v in added.inputs if (n := _number(v)) is not None), None) if added else None
    normalized = _normalized(root, source)
    if epsilon is None or normalized is None:
        return False
    scaled = _reader(normalized, "Mul")
    scale = next((v for v in scaled.inputs if weight(v) is not None), None) if scaled else None
    if scaled is None or scale is None or scale.const_value is None or len(scale.const_value.shape) != 1:
        return False
    with NodeWriter(model.graph, before=scaled) as w:
        normed = w.op("RMSNormalization", source, scale, axis=-1, epsilon=epsilon)
    replace_output(scaled.outputs[0], normed)
    return True


def _normalized(root: ir.Node | None, source: ir.Value | None) -> ir.Node | None:
    """The node that makes x * (1 / root), or x / root."""
    divided = _reader(root, "Div")
    if root is None or divided is None or divided.inputs[1] is not root.outputs[0]:
        return None
    if divided.inputs[0] is source:
        return divided
    product = _reader(divided, "Mul") if _number(divided.inputs[0]) == 1 else None
    return product if product is not None and source in product.inputs else None


def _reader(node: ir.Node | None, kind: str) -> ir.Node | None:
    """The only reader of a node's output, if it is of that kind."""
    reader = only_consumer(node.outputs[0]) if node is not None else None
    return reader if reader is not None and reader.op_type == kind else None


def _number(value: ir.Value | None) -> float | None:
    tensor = weight(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def _over_last_axis(mean: ir.Node) -> bool:
    axes = weight(mean.inputs[1]) if len(mean.inputs) > 1 else None
    kept = mean.attributes.get_int("keepdims", 1) == 1
    return axes is not None and kept and axes.numpy().tolist() == [-1]
