"""The pass that infers all shapes anew: names of inputs and what is made of them, nothing else."""

import onnx_ir as ir
import pytest

from forerun.errors import ExportError
from forerun_export.passes import true_shapes
from forerun_export.passes.graph_tools import CONTRIB


def model_of(*nodes: ir.Node, inputs: list[ir.Value]) -> ir.Model:
    graph = ir.Graph(inputs, nodes[-1].outputs, nodes=nodes, opset_imports={"": 24, CONTRIB: 1}, name="graph")
    return ir.Model(graph, ir_version=11)


def given(name: str, *shape: int | str, kind: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))


def test_what_was_declared_gives_way_to_what_follows_from_the_inputs() -> None:
    x = given("x", "B", "S", 4)
    twice = ir.node("Concat", [x, x, x], attributes={"axis": 1})
    twice.outputs[0].shape, twice.outputs[0].type = ir.Shape(["batch", 7]), ir.TensorType(ir.DataType.INT64)
    model = model_of(twice, inputs=[x])
    assert true_shapes.apply(model).modified
    assert twice.outputs[0].shape == ir.Shape(["B", "3*S", 4])
    assert twice.outputs[0].dtype == ir.DataType.FLOAT
    assert not true_shapes.apply(model).modified


def test_a_size_that_depends_on_data_stays_open() -> None:
    x = given("x", "B", "S")
    places = ir.node("NonZero", [x])
    true_shapes.apply(model_of(places, inputs=[x]))
    assert places.outputs[0].shape == ir.Shape([2, None])


def test_onnxruntime_s_products_have_the_columns_of_their_matrix() -> None:
    rows, matrix = given("x", "B", "S", 4, kind=ir.DataType.UINT8), given("w", 4, 6, kind=ir.DataType.INT8)
    scales = [given("a", 1), given("b", 6)]
    product = ir.node("MatMulIntegerToFloat", [rows, matrix, *scales], domain=CONTRIB)
    true_shapes.apply(model_of(product, inputs=[rows, matrix, *scales]))
    assert (product.outputs[0].shape, product.outputs[0].dtype) == (ir.Shape(["B", "S", 6]), ir.DataType.FLOAT)


def test_operators_that_do_not_fit_together_are_refused_with_the_reason() -> None:
    x = given("x", "B", "S")
    misused = ir.node("Concat", [x, x])
    with pytest.raises(ExportError, match=r"shapes do not fit together: .*axis.*; use another front end"):
        true_shapes.apply(model_of(misused, inputs=[x]))
