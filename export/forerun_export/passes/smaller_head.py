"""A head that computes the logits of some tokens only; logits stay [B,R,V], and all others get LOWEST.

For drafts: what a draft never proposes has q = 0, which is exact, and a head over a fifth of the vocabulary takes a
fifth of the time. The tokens are a few ranges of ids, of which the head's columns are cut when the graph is loaded:
weights on disk stay as they are, and the embedding keeps all tokens.

LOWEST is finite: exp() of it is 0 beside any logit that was computed, as it would be for minus infinity, but a request
that rules out every token of the smaller head still leaves the draft a law.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export.passes.graph_tools import (
    NodeWriter,
    Outcome,
    constant,
    drop_unused,
    graph_input,
    head,
    producer,
    weight,
)

LOWEST = -1e30
Ranges = Sequence[tuple[int, int]]
"""Ascending (first, one past the last) token ids."""

# Which inputs of the product hold the columns of its matrix, and along which axis.
_COLUMNS = {"MatMul": {1: 1}, "MatMulIntegerToFloat": {1: 1, 3: 0}}


def ranges_of(tokens: Iterable[int]) -> Ranges:
    """The ranges that hold exactly these token ids."""
    ranges: list[tuple[int, int]] = []
    for token in sorted(set(tokens)):
        if ranges and ranges[-1][1] == token:
            ranges[-1] = ranges[-1][0], token + 1
        else:
            ranges.append((token, token + 1))
    return ranges


def apply(model: ir.Model, *, ranges: Ranges) -> Outcome:
    """Compute the logits of the tokens in `ranges` only. Raises ExportError if the head cannot be cut."""
    product, logits = head(model), next(value for value in model.graph.outputs if value.name == "logits")
    vocabulary = int(logits.shape[2]) if logits.shape is not None else 0  # type: ignore[arg-type]
    if sum(end - start for start, end in ranges) >= vocabulary:
        return Outcome(False, f"all {vocabulary} tokens are asked for")
    if product is None or not _only_scalars_between(product, logits):
        raise ExportError("the draft's head cannot be made smaller: it is no plain product; leave draft.vocabulary out")
    for position, axis in _COLUMNS[product.op_type].items():
        with NodeWriter(model.graph, before=product) as w:
            product.replace_input_with(position, _columns(w, product.inputs[position], axis, ranges))
    _spread(model, ranges, vocabulary)
    drop_unused(model)
    return Outcome(True)


def _only_scalars_between(product: ir.Node, logits: ir.Value) -> bool:
    """Whether what follows the product treats all tokens alike."""
    node = logits.producer()
    while node is not None and node is not product:
        tensors = (weight(value) for value in node.inputs[1:])
        if any(tensor is not None and tensor.size > 1 for tensor in tensors):
            return False
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node is product


def _columns(w: NodeWriter, matrix: ir.Value | None, axis: int, ranges: Ranges) -> ir.Value:
    """The chosen columns; of a transposed matrix the rows, so that no other is ever transposed."""
    transpose = producer(matrix, "Transpose")
    if transpose is not None:
        return w.op("Transpose", _columns(w, transpose.inputs[0], 1 - axis, ranges), perm=(1, 0))
    parts = [w.op("Slice", matrix, w.integers(start), w.integers(end), w.integers(axis)) for start, end in ranges]
    return w.op("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]


def _spread(model: ir.Model, ranges: Ranges, vocabulary: int) -> None:
    """[B,R,tokens of the ranges] -> [B,R,V]."""
    place = next(place for place, value in enumerate(model.graph.outputs) if value.name == "logits")
    few = model.graph.outputs[place]
    few.name = "smaller_head.logits"
    with NodeWriter(model.graph, after=few.producer()) as w:
        widths = [end - start for start, end in ranges]
        parts = w.ops("Split", few, w.integers(*widths), names=[None] * len(ranges), axis=-1)
        pieces, done = list[ir.Value](), 0
        for (start, end), part in zip(ranges, parts, strict=True):
            pieces += [*_lowest(model, w, start - done), part]
            done = end
        logits = w.op("Concat", *pieces, *_lowest(model, w, vocabulary - done), axis=-1, name="logits")
    logits.type, logits.shape = few.type, few.shape
    few.shape = None
    model.graph.outputs[place] = logits


def _lowest(model: ir.Model, w: NodeWriter, width: int) -> list[ir.Value]:
    """LOWEST [B,R,width], if that is any."""
    if width == 0:
        return []
    lowest = constant(model.graph, "forerun.lowest", np.full((1, 1, 1), LOWEST, np.float32))
    shape = w.op("Concat", w.op("Shape", graph_input(model, "logit_rows")), w.integers(width), axis=0)
    return [w.op("Expand", lowest, shape)]
