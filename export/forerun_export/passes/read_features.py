"""A draft head's graph, from a decoder of one layer whose embedding and head are to be the target's.

    g       = the row of `features` [B,1,F,h] that `feature_rows` [B,S] names                   [B,S,h]
    x       = J concat(rmsnorm(embedding of input_ids), rmsnorm(g))          in the embedding's place
    hidden  = the layer's output at `logit_rows`                             [B,1,R,h], features of the next step
    logits  = those of the candidate tokens; all others get LOWEST           [B,R,V]

The rows of the target's head for the candidate tokens are a matrix of the head's own, so that a product of all tokens
is never made.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export.passes.drop_layers import embedded
from forerun_export.passes.graph_tools import (
    NodeWriter,
    Outcome,
    add_input,
    constant,
    derived_weight,
    drop_unused,
    graph_input,
    head,
    producer,
    register,
    sizes,
    weight,
)
from forerun_export.passes.smaller_head import LOWEST
from forerun_export.passes.tied_head import embedding


@dataclass(frozen=True)
class Join:
    """The head's own numbers around its layer: J [h,2h], and the two norms' weights [h]."""

    matrix: np.ndarray
    embedding_norm: np.ndarray
    feature_norm: np.ndarray
    epsilon: float


@dataclass(frozen=True)
class Shared:
    """What the head has of its target: the embedding [V,h] and, of its candidate tokens, the head's columns [h,N]."""

    embedding: ir.TensorProtocol
    columns: ir.TensorProtocol
    vocabulary_size: int


def shared_with(target: ir.Model, tokens: np.ndarray) -> Shared:
    """Of a target in contract form, for these tokens. Raises ExportError if its head is no plain product."""
    table, product = weight(embedding(target)), head(target)
    logits = next(value for value in target.graph.outputs if value.name == "logits")
    if table is None or product is None or logits.shape is None:
        raise ExportError("a head cannot share this target's embedding and head; use another draft")
    transpose = producer(product.inputs[1], "Transpose")
    matrix = weight(product.inputs[1] if transpose is None else transpose.inputs[0])
    if matrix is None:
        raise ExportError("a draft head needs a target whose own head is a plain product; use another draft")

    def columns(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array[:, tokens] if transpose is None else array[tokens].T)

    width = sizes(matrix)[0 if transpose is None else 1]
    return Shared(
        table,
        derived_weight("candidates.weight_t", [width, len(tokens)], [matrix], columns),
        int(logits.shape[2]),  # type: ignore[arg-type]
    )


def apply(model: ir.Model, *, join: Join, shared: Shared, tokens: np.ndarray) -> Outcome:
    """Rewrite a decoder of one layer in contract form; `tokens` [N] are the candidates, ascending."""
    _read_features(model, join, shared)
    _give_hidden(model)
    product = head(model)
    if product is None:
        raise ExportError("the head's layer has no plain product behind it; use another draft")
    product.replace_input_with(1, register(model.graph, shared.columns))
    _spread(model, tokens, shared.vocabulary_size)
    drop_unused(model)
    return Outcome(True)


def _read_features(model: ir.Model, join: Join, shared: Shared) -> None:
    size = len(join.matrix)
    features = add_input(model, "features", ir.DataType.FLOAT, ["B", 1, "F", size])
    rows = add_input(model, "feature_rows", ir.DataType.INT64, ["B", "S"])
    old = embedded(model)
    readers = list(old.uses())
    with NodeWriter(model.graph, after=old.producer()) as w:
        table = ir.Value(
            name="target.embedding",
            shape=ir.Shape(sizes(shared.embedding)),
            type=ir.TensorType(shared.embedding.dtype),
            const_value=shared.embedding,
        )
        model.graph.register_initializer(table)
        found = w.op("Gather", table, graph_input(model, "input_ids"))
        taken = w.op(
            "GatherND", w.op("Squeeze", features, w.integers(1)), w.op("Unsqueeze", rows, w.integers(-1)), batch_dims=1
        )
        norms = (
            ("embedding_norm.weight", found, join.embedding_norm),
            ("feature_norm.weight", taken, join.feature_norm),
        )
        parts = [
            w.op("RMSNormalization", value, constant(model.graph, name, array), epsilon=join.epsilon, axis=-1)
            for name, value, array in norms
        ]
        matrix = register(model.graph, ir.tensor(np.ascontiguousarray(join.matrix.T), name="join.weight_t"))
        joined = w.op("MatMul", w.op("Concat", *parts, axis=-1), matrix, name="joined")
    for node, place in readers:
        node.replace_input_with(place, joined)


def _give_hidden(model: ir.Model) -> None:
    chosen = next(node.outputs[0] for node in model.graph if node.outputs[0].name == "logit_rows.hidden")
    with NodeWriter(model.graph, after=chosen.producer()) as w:
        hidden = w.op("Unsqueeze", chosen, w.integers(1), name="hidden")
    size = graph_input(model, "features").shape[3]  # type: ignore[index]
    hidden.type, hidden.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["B", 1, "R", size])
    model.graph.outputs.insert(1, hidden)


def _spread(model: ir.Model, tokens: np.ndarray, vocabulary_size: int) -> None:
    """[B,R,N] -> [B,R,V]: each of the scattered tokens goes to its place.

    A Gather that looks up N for each place of V takes three times as long.
    """
    few = model.graph.outputs[0]
    few.name = "candidates.logits"
    with NodeWriter(model.graph, after=few.producer()) as w:
        rows = w.op("Shape", graph_input(model, "logit_rows"))
        lowest = constant(model.graph, "forerun.lowest", np.full((1, 1, 1), LOWEST, np.float32))
        all_lowest = w.op("Expand", lowest, w.op("Concat", rows, w.integers(vocabulary_size), axis=0))
        places = constant(model.graph, "candidates.tokens", tokens.astype(np.int64).reshape(1, 1, -1))
        places = w.op("Expand", places, w.op("Concat", rows, w.integers(len(tokens)), axis=0))
        logits = w.op("ScatterElements", all_lowest, places, few, axis=2, name="logits")
    logits.type, logits.shape = few.type, ir.Shape(["B", "R", vocabulary_size])
    few.shape = None
    model.graph.outputs[0] = logits
