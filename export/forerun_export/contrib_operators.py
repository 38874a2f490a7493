"""onnxruntime's own operators that quantized graphs use, described to the tools that infer and check shapes.

Behind an operator that it has no schema of, ONNX's inference keeps silent about whatever is wrong in the graph. Both
operators are products of x [..,K] and a matrix [K,N]: their output is float32 [..,N].
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import onnx
import onnx_ir as ir
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceContext
from onnx_shape_inference import ShapeInferenceContext, registry

from forerun_export.passes.graph_tools import CONTRIB


@contextmanager
def schemas() -> Iterator[None]:
    """Within the block ONNX knows these operators, and checks their inputs and attributes too."""
    added = [schema for schema in _schemas() if not onnx.defs.has(schema.name, schema.domain)]
    for schema in added:
        onnx.defs.register_schema(schema)
    try:
        yield
    finally:
        for schema in added:
            onnx.defs.deregister_schema(schema.name, schema.since_version, schema.domain)


def _schemas() -> list[OpSchema]:
    """As onnxruntime defines them, for the element types that forerun's graphs have."""
    return [
        _schema(
            "MatMulNBits",
            {"A": "float", "B": "uint8", "scales": "float", "zero_points": "uint8"},
            {"K": True, "N": True, "block_size": True, "bits": False, "accuracy_level": False},
            width=lambda context: int(context.get_attribute("N").i),
        ),
        _schema(
            "MatMulIntegerToFloat",
            {"A": "uint8", "B": "int8", "a_scale": "float", "b_scale": "float", "a_zero_point": "uint8"},
            {},
            width=_columns,
        ),
    ]


def _schema(
    name: str,
    inputs: Mapping[str, str],
    attributes: Mapping[str, bool],
    *,
    width: Callable[[InferenceContext], int | None],
) -> OpSchema:
    """Of a product: its inputs with their types, its integer attributes and whether they must be there, and its N."""

    def infer(context: InferenceContext) -> None:
        output = onnx.TypeProto()
        output.tensor_type.elem_type = onnx.TensorProto.FLOAT
        rows, columns = context.get_input_type(0), width(context)
        if rows is not None and rows.tensor_type.shape.dim and columns is not None:
            output.tensor_type.shape.CopyFrom(rows.tensor_type.shape)
            output.tensor_type.shape.dim[-1].dim_value = columns
        context.set_output_type(0, output)

    schema = OpSchema(
        name,
        CONTRIB,
        1,
        inputs=[OpSchema.FormalParameter(name, f"tensor({kind})") for name, kind in inputs.items()],
        outputs=[OpSchema.FormalParameter("Y", "tensor(float)")],
        attributes=[
            OpSchema.Attribute(name, OpSchema.AttrType.INT, required=required) for name, required in attributes.items()
        ],
    )
    schema.set_type_and_shape_inference_function(infer)
    return schema


def _columns(context: InferenceContext) -> int | None:
    """N of the product's second input [K,N]: a weight, or a weight transposed or cut."""
    matrix = context.get_input_type(1)
    return int(matrix.tensor_type.shape.dim[-1].dim_value) if matrix and matrix.tensor_type.shape.dim else None


def _infer_symbolically(context: ShapeInferenceContext, node: ir.Node) -> None:
    """The same for the library that knows sizes by name, which has MatMulNBits already."""
    rows, matrix = (value.shape if value is not None else None for value in node.inputs[:2])
    shape = ir.Shape([*rows[:-1], matrix[-1]]) if rows is not None and matrix is not None else None
    context.set_shape_and_dtype(node.outputs[0], shape, ir.DataType.FLOAT)


registry.register(CONTRIB, "MatMulIntegerToFloat", since_version=1)(_infer_symbolically)
