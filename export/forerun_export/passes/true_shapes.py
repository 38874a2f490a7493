"""Shapes and types of all computed values, inferred anew from the graph's inputs and weights.

What a front end declared is true of the graph that it made, before passes wrote caches, attention and rows anew; and
onnxruntime lets tensors of equal declared shapes share memory. A size is a number, a name that the inputs have (B, S,
R, C, F) or an expression of such names (3*S); a size that depends on data stays open.
"""

import onnx_ir as ir
from onnx_shape_inference import OpUsageError, ShapeInferenceError, infer_symbolic_shapes

from forerun.errors import ExportError
from forerun_export import contrib_operators  # noqa: F401 - makes them known to the library
from forerun_export.passes.graph_tools import Outcome


def apply(model: ir.Model) -> Outcome:
    """Declare every value's shape and type. Raises ExportError where operators do not fit together."""
    values = [value for node in model.graph.all_nodes() for value in node.outputs]
    before = [(value.shape, value.type) for value in values]
    for value in values:
        value.shape = value.type = None
    try:
        infer_symbolic_shapes(model, warn_on_missing=False, adopt_declared_symbols=False)
    except (OpUsageError, ShapeInferenceError) as error:
        reason = " ".join(str(error).split())
        raise ExportError(f"shapes do not fit together: {reason[:300]}; use another front end") from error
    known = {str(size) for value in model.graph.inputs for size in value.shape or () if not isinstance(size, int)}
    for value in values:
        _leave_invented_open(value, known)
    return Outcome([(value.shape, value.type) for value in values] != before, "all shapes were right already")


def _leave_invented_open(value: ir.Value, known: set[str]) -> None:
    """Sizes with names that inference made up have no name."""
    if value.shape is not None:
        value.shape = ir.Shape(
            None if isinstance(size, ir.SymbolicDim) and not size.free_symbols() <= known else size
            for size in value.shape
        )
