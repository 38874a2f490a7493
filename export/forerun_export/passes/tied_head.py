"""A head that is the transposed embedding reads the embedding's own buffer.

On disk there is then one copy. In memory, onnxruntime's CPU provider transposes and packs the head's weight into a
private copy when it loads, and leaves the embedding in the mapped file, of which only the rows looked up become
resident: the cost is one copy of the embedding (108 MiB for SmolLM2-135M), as without tying.

Tried and left (SmolLM2's head, 2 threads): Gemm with transB packs the same copy; an embedding that onnxruntime may
not treat as a constant saves the copy, but takes 1.7 times as long for 5 rows and its single row differs from the
row of a larger call in the last bits.
"""

import numpy as np
import onnx_ir as ir

from forerun_export.passes.graph_tools import (
    NodeWriter,
    Outcome,
    drop_unused,
    head,
    nodes_of,
    producer,
    sizes,
    weight,
)


def apply(model: ir.Model) -> Outcome:
    """Let the head read Transpose(embedding) if its weight has the same values."""
    product = head(model)
    table = embedding(model)
    if product is None or table is None:
        return Outcome(False, "the graph has no MatMul head or no embedding")
    if producer(product.inputs[1], "Transpose") is not None:
        return Outcome(False, "the head reads the embedding's buffer already")
    matrix, rows = weight(product.inputs[1]), weight(table)
    if matrix is None or rows is None or not _is_transposed(matrix, rows):
        return Outcome(False, "the head has weights of its own")
    with NodeWriter(model.graph, before=product) as w:
        product.replace_input_with(1, w.op("Transpose", table, perm=(1, 0)))
    drop_unused(model)
    return Outcome(True)


def embedding(model: ir.Model) -> ir.Value | None:
    """The table [V,h] that `input_ids` look up."""
    return next(
        (
            node.inputs[0]
            for node in nodes_of(model, "Gather")
            if node.inputs[1] is not None and node.inputs[1].name == "input_ids"
        ),
        None,
    )


def _is_transposed(matrix: ir.TensorProtocol, table: ir.TensorProtocol) -> bool:
    if sizes(matrix) != sizes(table)[::-1]:
        return False
    return bool(np.array_equal(matrix.numpy(), table.numpy().T))
