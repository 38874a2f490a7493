"""Turns sampling graphs into ONNX files of plain standard operators."""

from collections.abc import Callable, Iterator
from typing import Any

import onnx
import onnx_ir
from onnx_ir.passes import Sequential
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    InlinePass,
    NameFixPass,
    RemoveUnusedNodesPass,
)
from onnxscript.optimizer import optimize_ir

IR_VERSION = 11
_INVENTED = "unk__"  # how names begin that ONNX's inference makes up


def sampling_model(graph: Callable[..., Any], vocabulary_size: int) -> onnx_ir.Model:
    """The model of a traced graph, with V fixed, formulas inlined, constants folded and all shapes declared."""
    model: onnx_ir.Model = onnx_ir.from_proto(graph.to_model_proto())  # type: ignore[attr-defined]
    for value in (*model.graph.inputs, *model.graph.outputs):
        sizes = value.shape or ()
        value.shape = onnx_ir.Shape(vocabulary_size if str(size) == "V" else size for size in sizes)
    InlinePass()(model)
    _forget_inner_shapes(model)
    optimize_ir(model)
    _drop_empty_pads(model)
    _drop_casts_of_literals(model)
    Sequential(RemoveUnusedNodesPass(), ClearMetadataAndDocStringPass(), NameFixPass())(model)
    model.ir_version = IR_VERSION
    return _with_shapes(model)


def _with_shapes(model: onnx_ir.Model) -> onnx_ir.Model:
    """The model with the shape of every value declared; sizes that depend on data stay open.

    Not by the passes' `true_shapes`: that library refuses a Loop without a condition, which ONNX allows.
    """
    inferred = onnx.shape_inference.infer_shapes(
        onnx_ir.to_proto(model), check_type=True, strict_mode=True, data_prop=True
    )
    for graph in _graphs(inferred.graph):
        for value in graph.value_info:
            for size in value.type.tensor_type.shape.dim:
                if size.dim_param.startswith(_INVENTED):
                    size.ClearField("dim_param")
    return onnx_ir.from_proto(inferred)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the bodies of its If and Loop nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _forget_inner_shapes(model: onnx_ir.Model) -> None:
    """Drop the shapes that inlined formulas declare: "R" is K in one and K+1 in the next.

    onnxruntime lets tensors of equal symbolic shapes share memory, so a wrong name is a wrong buffer.
    """
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value not in model.graph.outputs:
                value.shape = None


def _drop_empty_pads(model: onnx_ir.Model) -> None:
    """Take out every Pad that adds nothing: it would copy all logits."""
    for node in model.graph.all_nodes():
        if node.op_type == "Pad" and _is_zero(node.inputs[1]) and (rows := node.inputs[0]) and node.graph:
            onnx_ir.convenience.replace_all_uses_with(node.outputs[0], rows)
            node.graph.remove(node, safe=True)


def _drop_casts_of_literals(model: onnx_ir.Model) -> None:
    """Take out the CastLike of every literal that the optimizer left, because types end at a Loop's body.

    Formulas write 1.0 where they mean a float and 1 where they mean an integer, so the literal has its type already.
    """
    for node in model.graph.all_nodes():
        if node.op_type == "CastLike" and (literal := node.inputs[0]) and node.graph:
            onnx_ir.convenience.replace_all_uses_with(node.outputs[0], literal)
            node.graph.remove(node, safe=True)


def _is_zero(value: onnx_ir.Value | None) -> bool:
    constant = value.const_value if value else None
    return constant is not None and not constant.numpy().any()
