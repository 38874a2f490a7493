"""A traced graph without what tracing leaves behind: constants as nodes, casts to the same type, Gemm.

Weights get the names of the modules that they belong to: the tracer names transposed ones by number.
"""

import re

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, LiftConstantsToInitializersPass

from forerun.errors import ExportError
from forerun_export.passes.graph_tools import (
    NodeWriter,
    Outcome,
    derived_weight,
    drop_unused,
    nodes_of,
    register,
    replace_output,
    sizes,
    weight,
)

OPSET = 24
# From this version on the operators that are left behind the passes mean what they mean in OPSET.
_OLDEST = 18
_NOTHING_DONE = {"Identity", "Dropout"}
_PRODUCT_NAME = re.compile(r"/?(.*)/(?:MatMul|Gemm)(?:_\d+)?")


def apply(model: ir.Model) -> Outcome:
    """Tidy the graph in place. Raises ExportError for control flow, local functions and other opsets."""
    _refuse(model)
    ClearMetadataAndDocStringPass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for node in list(model.graph):
        if node.op_type in _NOTHING_DONE and node.inputs[0] is not None:
            replace_output(node.outputs[0], node.inputs[0])
    _name_weights(model)
    for node in nodes_of(model, "Gemm"):
        _as_product(model, node)
    drop_unused(model)
    model.opset_imports[""] = OPSET
    model.graph.opset_imports[""] = OPSET
    return Outcome(True)


def _refuse(model: ir.Model) -> None:
    opset = model.opset_imports.get("", 0)
    if not _OLDEST <= opset <= OPSET:
        raise ExportError(f"the graph has opset {opset}; export it with an opset from {_OLDEST} to {OPSET}")
    for node in model.graph:
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            raise ExportError(f"node {node.name} ({node.op_type}) is control flow; export the model without it")
        if node.domain:
            raise ExportError(
                f"node {node.name} is {node.domain}.{node.op_type}, no standard operator; export without optimization"
            )
    for name, value in model.graph.initializers.items():
        if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            raise ExportError(f"the weight {name} is {value.dtype}; export the model in float32")


def _as_product(model: ir.Model, node: ir.Node) -> None:
    """Gemm(x, w, b) as Add(MatMul(x, w), b), which the other passes and the quantized formats know."""
    plain = node.attributes.get_float("alpha", 1.0) == node.attributes.get_float("beta", 1.0) == 1.0
    matrix = weight(node.inputs[1])
    if not plain or node.attributes.get_int("transA", 0) != 0 or matrix is None:
        return
    value = node.inputs[1]
    if node.attributes.get_int("transB", 0):
        flipped = derived_weight(f"{matrix.name}.transposed", sizes(matrix)[::-1], [matrix], np.transpose)
        value = model.graph.initializers.get(str(flipped.name)) or register(model.graph, flipped)
    with NodeWriter(model.graph, before=node) as w:
        out = w.op("MatMul", node.inputs[0], value)
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            out = w.op("Add", out, node.inputs[2])
    replace_output(node.outputs[0], out)


def _name_weights(model: ir.Model) -> None:
    """Call a product's weight `layers.0.mlp.down_proj.weight` after the node `/layers.0/mlp/down_proj/MatMul`."""
    for node in [*nodes_of(model, "MatMul"), *nodes_of(model, "Gemm")]:
        value, match = node.inputs[1], _PRODUCT_NAME.fullmatch(str(node.name))
        if value is None or weight(value) is None or match is None or not str(value.name).startswith("onnx::"):
            continue
        name = match[1].replace("/", ".") + ".weight"
        if name not in model.graph.initializers:
            value.name = name
