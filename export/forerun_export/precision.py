"""The formats of weights, and the passes that bring a float32 graph to one."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export.passes import int4_weights, int8_weights, smoothing
from forerun_export.passes.graph_tools import Outcome
from forerun_export.recipe import Precision

logger = logging.getLogger(__name__)

_PRODUCTS = {"MatMulNBits": "int4", "MatMulIntegerToFloat": "int8"}


def quantize(model: ir.Model, precision: Precision, *, largest_inputs: Mapping[str, np.ndarray] | None = None) -> None:
    """Bring a float32 graph in contract form to `precision`.

    `largest_inputs` (see `calibration`) lets int8 hold activations better. Raises ExportError if there is no product
    to quantize.
    """
    if precision == "int4":
        _apply(int4_weights.apply, model)
    if precision != "fp32":  # int8 takes every shape, and so what 4 bits leave
        if largest_inputs is not None:
            _apply(partial(smoothing.apply, largest_inputs=largest_inputs), model)
        _apply(int8_weights.apply, model)
        if not products(model):
            raise ExportError(f"nothing in the graph can be in {precision}; use fp32")


def _apply(apply: Callable[[ir.Model], Outcome], model: ir.Model) -> None:
    outcome = apply(model)
    logger.info("%s: %s", apply, "done" if outcome.modified else f"nothing done, {outcome.reason}")


def products(model: ir.Model) -> dict[str, int]:
    """How many products with weights are in which quantized format."""
    return dict(Counter(_PRODUCTS[node.op_type] for node in model.graph if node.op_type in _PRODUCTS))


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all weights that a graph reads."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
