"""The formats of weights, and the passes that bring a float32 graph to one."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export.passes import int4_weights, int8_weights
from forerun_export.passes.graph_tools import Outcome
from forerun_export.recipe import Precision

logger = logging.getLogger(__name__)

# int8 takes every shape, so it follows int4 for what 4 bits leave.
PASSES: Mapping[Precision, Sequence[Callable[[ir.Model], Outcome]]] = {
    "fp32": (),
    "int8": (int8_weights.apply,),
    "int4": (int4_weights.apply, int8_weights.apply),
}
_PRODUCTS = {"MatMulNBits": "int4", "MatMulIntegerToFloat": "int8"}


def quantize(model: ir.Model, precision: Precision) -> None:
    """Bring a float32 graph in contract form to `precision`. Raises ExportError if it has no product to quantize."""
    for apply in PASSES[precision]:
        outcome = apply(model)
        logger.info("%s: %s", apply.__module__, "done" if outcome.modified else f"nothing done, {outcome.reason}")
    if precision != "fp32" and not products(model):
        raise ExportError(f"nothing in the graph can be in {precision}; use fp32")


def products(model: ir.Model) -> dict[str, int]:
    """How many products with weights are in which quantized format."""
    return dict(Counter(_PRODUCTS[node.op_type] for node in model.graph if node.op_type in _PRODUCTS))


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all weights that a graph reads."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
