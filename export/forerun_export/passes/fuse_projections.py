"""One matrix product for projections that read the same value: q/k/v, and gate/up.

Fewer, wider products keep the threads busier and start fewer kernels. The weights are concatenated once, when they
are written; biases (Qwen2 has them on q, k and v) are concatenated alike.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from forerun_export.passes.graph_tools import (
    NodeWriter,
    Outcome,
    derived_weight,
    drop_unused,
    nodes_of,
    only_consumer,
    register,
    replace_output,
    sizes,
    weight,
)


@dataclass(frozen=True)
class _Projection:
    """MatMul(x, weight [in,out]) and the Add of a bias [out] behind it, if there is one."""

    product: ir.Node
    weight: ir.TensorProtocol
    bias: ir.TensorProtocol | None
    output: ir.Value


def apply(model: ir.Model) -> Outcome:
    """Fuse every group of two or more projections of one value."""
    groups: dict[tuple[ir.Value, bool], list[_Projection]] = defaultdict(list)
    for node in nodes_of(model, "MatMul"):
        projection = _read_projection(node)
        source = node.inputs[0]
        if projection is not None and source is not None:
            groups[source, projection.bias is None].append(projection)
    fused = [group for group in groups.values() if len(group) > 1]
    for group in fused:
        _fuse(model, group)
    drop_unused(model)
    return Outcome(bool(fused), "" if fused else "no two projections read the same value")


def _read_projection(node: ir.Node) -> _Projection | None:
    matrix = weight(node.inputs[1])
    if matrix is None or len(matrix.shape) != 2:
        return None
    output = node.outputs[0]
    following = only_consumer(output)
    if following is None or following.op_type != "Add":
        return _Projection(node, matrix, None, output)
    bias = next((tensor for value in following.inputs if (tensor := weight(value)) is not None), None)
    if bias is None or len(bias.shape) != 1:
        return _Projection(node, matrix, None, output)
    return _Projection(node, matrix, bias, following.outputs[0])


def _fuse(model: ir.Model, group: list[_Projection]) -> None:
    widths = [sizes(projection.weight)[1] for projection in group]
    name = joined_name([projection.weight.name or "" for projection in group])
    inner = sizes(group[0].weight)[0]
    matrices = [projection.weight for projection in group]
    fused = derived_weight(name, [inner, sum(widths)], matrices, _side_by_side)
    with NodeWriter(model.graph, before=group[0].product) as w:
        out = w.op("MatMul", group[0].product.inputs[0], register(model.graph, fused))
        biases = [projection.bias for projection in group if projection.bias is not None]
        if biases:
            bias_name = joined_name([bias.name or "" for bias in biases])
            bias = derived_weight(bias_name, [sum(widths)], biases, _side_by_side)
            out = w.op("Add", out, register(model.graph, bias))
        parts = w.ops("Split", out, w.integers(*widths), names=[None] * len(widths), axis=-1)
    for projection, part in zip(group, parts, strict=True):
        replace_output(projection.output, part)


def _side_by_side(*arrays: np.ndarray) -> np.ndarray:
    return np.concatenate(arrays, axis=-1)


def joined_name(names: list[str]) -> str:
    """`l.0.q_proj.weight` and `l.0.k_proj.weight` -> `l.0.q_proj+k_proj.weight`."""
    columns = list(zip(*(name.split(".") for name in names), strict=False))
    return ".".join(column[0] if len(set(column)) == 1 else "+".join(column) for column in columns)
