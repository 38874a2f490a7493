"""Sizes that a traced graph computes at run time, written as constants or from the shapes of its inputs.

A tracer computes every reshape's target from shapes of intermediate values. Which sizes those are is seen by running
the graph in calls of three different sizes: a dimension is then a constant, or B, S, P, P + S or B * S times a constant
(B rows of S new tokens behind P past ones). After the pass

    Reshape   has a constant target, where 0 keeps a dimension and -1 takes what is left
    Shape     of a data value is made of the shapes of input_ids and of a cache, so that no side value depends on data
    other     operands (of Slice, Split, ..) that are equal in all calls are constants
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export.passes.evaluation import Array, Piece
from forerun_export.passes.graph_tools import (
    NodeWriter,
    Outcome,
    constant,
    drop_unused,
    graph_input,
    producer,
    replace_output,
    weight,
)
from forerun_export.passes.sides import Run, data_values, past_inputs

# Prime or coprime sizes, so that no two of B, S, P, P + S and small multiples are equal in all three.
RUNS = (Run(batch=2, new=3, past=7), Run(batch=3, new=5, past=11), Run(batch=5, new=2, past=17))
_SAME_TYPE_AND_SHAPE = {"Cast", "Reshape", "Expand"}


@dataclass(frozen=True)
class Dimension:
    """`factor` times what `kind` says: "1", "B", "S", "P", "P+S" or "B*S"; kind "?" is something else."""

    kind: str
    factor: int = 1

    @property
    def constant(self) -> int | None:
        """The size, if it is the same in every call."""
        return self.factor if self.kind == "1" else None


def apply(model: ir.Model, *, context: int) -> Outcome:
    """Fix all sizes in place, for calls of up to `context` tokens.

    Raises ExportError if the graph cannot be run, or if a size that is needed follows no known rule.
    """
    data = data_values(model)
    seen = _observe(model, _observed(model, data))
    for value, arrays in seen.items():
        value.shape = ir.Shape([_text(dimension) for dimension in dimensions(arrays)])
        value.type = ir.TensorType(ir.DataType.from_numpy(arrays[0].dtype))
    for node in list(model.graph):
        if node.op_type in _SAME_TYPE_AND_SHAPE and node.outputs[0] in data and _keeps(node, seen):
            replace_output(node.outputs[0], node.inputs[0])  # type: ignore[arg-type]
        elif node.op_type == "Reshape" and node.outputs[0] in data:
            _fix_reshape(model, node, seen)
        elif node.op_type == "Shape" and _is_computed(node.inputs[0], data):
            _fix_shape(model, node, seen)
    drop_unused(model)
    _fix_operands(model, context)
    drop_unused(model)
    return Outcome(True)


def _is_computed(value: ir.Value | None, data: set[ir.Value]) -> bool:
    return value is not None and value in data and value.producer() is not None


def _observed(model: ir.Model, data: set[ir.Value]) -> list[ir.Value]:
    """The values whose shapes and types are needed."""
    wanted: list[ir.Value] = []
    for node in model.graph:
        if node.op_type in (*_SAME_TYPE_AND_SHAPE, "Shape"):
            ends = [node.inputs[0], *(node.outputs if node.op_type != "Shape" else ())]
            wanted += [value for value in ends if value is not None and value in data]
        elif node.op_type == "MatMul" and all(value in data for value in node.inputs):
            wanted.append(node.outputs[0])
    return list(dict.fromkeys(wanted))


Seen = dict[ir.Value, list[Array]]


def _observe(model: ir.Model, values: Sequence[ir.Value]) -> Seen:
    """The arrays of values in each of RUNS."""
    computed = [value for value in values if value.producer() is not None]
    piece = Piece(model, computed)
    seen: Seen = {value: [] for value in values}
    for run in RUNS:
        feeds = run.feeds(model.graph.inputs)
        for value in values:
            if value in feeds:
                seen[value].append(feeds[value])
        for value, array in zip(computed, piece.run(feeds) if computed else (), strict=True):
            seen[value].append(array)
    return seen


def dimensions(arrays: Sequence[Array]) -> list[Dimension]:
    """The form of each dimension, from the arrays of one value in RUNS."""
    if len({array.ndim for array in arrays}) != 1:
        return [Dimension("?")]
    return [_dimension(list(sizes)) for sizes in zip(*(array.shape for array in arrays), strict=True)]


def _dimension(sizes: Sequence[int]) -> Dimension:
    if len(set(sizes)) == 1:
        return Dimension("1", sizes[0])
    bases = {
        "B": [run.batch for run in RUNS],
        "S": [run.new for run in RUNS],
        "P": [run.past for run in RUNS],
        "P+S": [run.past + run.new for run in RUNS],
        "B*S": [run.batch * run.new for run in RUNS],
    }
    for kind, base in bases.items():
        factors = {size / one for size, one in zip(sizes, base, strict=True)}
        if len(factors) == 1 and (factor := factors.pop()).is_integer():
            return Dimension(kind, int(factor))
    return Dimension("?")


def _text(dimension: Dimension) -> int | str:
    """The dimension as a shape has it: 48, "B", "6*B"."""
    if dimension.constant is not None:
        return dimension.constant
    return dimension.kind if dimension.factor == 1 else f"{dimension.factor}*{dimension.kind}"


def heads_of(scores: ir.Value) -> int | None:
    """The heads of a product [B,heads,S,T] or [B*heads,S,T] whose shape this pass has seen; None for another shape."""
    if scores.shape is None or len(scores.shape) not in (3, 4):
        return None
    dimension = str(scores.shape[len(scores.shape) - 3])
    if len(scores.shape) == 3:
        dimension = dimension.removesuffix("*B")
    return int(dimension) if dimension.isdigit() else None


def _keeps(node: ir.Node, seen: Seen) -> bool:
    """Whether a node only hands on what it reads."""
    before, after = seen.get(node.inputs[0], []), seen.get(node.outputs[0], [])  # type: ignore[arg-type]
    return bool(before) and all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(before, after, strict=True))


def _fix_reshape(model: ir.Model, node: ir.Node, seen: Seen) -> None:
    source = _before_reshapes(node)
    before, after = dimensions(seen[source]), dimensions(seen[node.outputs[0]])
    if before == after:
        replace_output(node.outputs[0], source)
        return
    kept = [place < len(before) and before[place] == wanted for place, wanted in enumerate(after)]
    target = [0 if keep else wanted.constant for keep, wanted in zip(kept, after, strict=True)]
    if target.count(None) > 1:
        return  # two sizes are computed; where it matters, the pass that needs them refuses
    with NodeWriter(model.graph, before=node) as w:
        node.replace_input_with(1, w.integers(*(-1 if size is None else size for size in target)))
    node.replace_input_with(0, source)
    node.attributes.pop("allowzero", None)


def _before_reshapes(node: ir.Node) -> ir.Value:
    """What a chain of reshapes starts from: only the last one counts."""
    value = node.inputs[0]
    while (earlier := producer(value, "Reshape")) is not None:
        value = earlier.inputs[0]
    assert value is not None
    return value


def _fix_shape(model: ir.Model, node: ir.Node, seen: Seen) -> None:
    value = node.inputs[0]
    assert value is not None
    found = dimensions(seen[value])
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(found))
    with NodeWriter(model.graph, before=node) as w:
        parts = [_size(w, model, dimension, value) for dimension in found[start:end]]
        shape = w.op("Concat", *parts, axis=0)
    replace_output(node.outputs[0], shape)


def _size(w: NodeWriter, model: ir.Model, dimension: Dimension, value: ir.Value) -> ir.Value:
    """The dimension as an int64 vector of one number."""
    ids, past = graph_input(model, "input_ids"), past_inputs(model)[0, "key"]
    match dimension.kind:
        case "1":
            return w.integers(dimension.factor)
        case "B":
            size = w.op("Shape", ids, start=0, end=1)
        case "S":
            size = w.op("Shape", ids, start=1, end=2)
        case "P":
            size = w.op("Shape", past, start=2, end=3)
        case "P+S":
            size = w.op("Add", w.op("Shape", past, start=2, end=3), w.op("Shape", ids, start=1, end=2))
        case "B*S":
            size = w.op("Size", ids)
        case _:
            raise ExportError(f"a size of {value.name} follows no known rule; use another front end")
    return size if dimension.factor == 1 else w.op("Mul", size, w.integers(dimension.factor))


def _fix_operands(model: ir.Model, context: int) -> None:
    """Make constants of the operands that data nodes read and that are the same in every call."""
    data = data_values(model)
    operands = [
        value
        for node in model.graph
        if any(output in data for output in node.outputs)
        for value in node.inputs
        if value is not None and value not in data and value.producer() is not None and not _is_tied(value)
    ]
    operands = list(dict.fromkeys(operands))
    piece = Piece(model, operands)
    runs = [piece.run(run.feeds(piece.inputs)) for run in (*RUNS, Run(batch=1, new=1, past=context - 1))]
    for value, (first, *others) in zip(operands, zip(*runs, strict=True), strict=True):
        if all(np.array_equal(first, other) for other in others):
            value.replace_all_uses_with(constant(model.graph, f"{value.name}.constant", first))


def _is_tied(value: ir.Value) -> bool:
    """The transpose of a weight: a head that shares the embedding's buffer."""
    node = value.producer()
    return node is not None and node.op_type == "Transpose" and weight(node.inputs[0]) is not None
