"""Weights in 8 bits, activations in 8 bits with a scale for each row: int8.

    s[b,s]   = max_k |x[b,s,k]| / 127                            the row's scale
    X        = round(x / s) + 128                                uint8, zero point 128
    y[b,s,n] = s[b,s] * t[n] * sum_k (X[b,s,k] - 128) W[k,n]     W int8 with a scale t for each output

The sum is one of integers and therefore exact in any order, and every other step treats each row by itself: rows
have the same bits whatever B and S are. One scale for all rows (DynamicQuantizeMatMul) would let a row's neighbours
change its logits. Activations are uint8 because onnxruntime multiplies int8 by int8 many times more slowly on x86.

The rows of embeddings are quantized alike, with a scale for each token, so that a tied head still reads the
embedding's own buffer.

MatMulIntegerToFloat is onnxruntime's own operator for its CPU provider: the product and the scales t in one pass.
A processor without VNNI instructions (x86 before 2019 or so) adds the products of neighbours with saturation there:
rows stay bit-identical, but are less exact.
"""

from functools import partial

import numpy as np
import onnx_ir as ir

from forerun_export.passes.graph_tools import (
    CONTRIB,
    NodeWriter,
    Outcome,
    constant,
    derived_weight,
    drop_unused,
    graph_input,
    head,
    nodes_of,
    producer,
    register,
    replace_output,
    sizes,
    weight,
)

LARGEST = 127
"""Of a quantized number: the same on both sides of zero."""
ZERO_POINT = 128


def apply(model: ir.Model) -> Outcome:
    """Quantize every product with a constant matrix, and every embedding."""
    products = [node for node in nodes_of(model, "MatMul") if is_constant(node.inputs[1])]
    lookups = [node for node in nodes_of(model, "Gather") if _is_embedding(node)]
    if not products and not lookups:
        return Outcome(False, "the graph has no product with a constant matrix and no embedding")
    rewriting = _Int8(model)
    for node in lookups:
        rewriting.look_up(node)
    for node in products:
        rewriting.multiply(node)
    drop_unused(model)
    model.opset_imports[CONTRIB] = 1
    return Outcome(True)


def is_constant(value: ir.Value | None) -> bool:
    """A matrix [K,N]: an initializer or the transpose of one."""
    tensor = weight(initializer_of(value))
    return tensor is not None and len(tensor.shape) == 2


def initializer_of(matrix: ir.Value | None) -> ir.Value | None:
    """What a product's second input is made of: itself, or what is transposed into it."""
    transpose = producer(matrix, "Transpose")
    return transpose.inputs[0] if transpose is not None else matrix


def _is_embedding(node: ir.Node) -> bool:
    ids, table = node.inputs[1], weight(node.inputs[0])
    return ids is not None and ids.name == "input_ids" and table is not None and len(table.shape) == 2


class _Int8:
    """Rewrites nodes of one model; what several of them read is quantized once."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._head = head(model)
        self._weights: dict[tuple[ir.Value, int], tuple[ir.Value, ir.Value]] = {}
        self._rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._zero_points: dict[str, ir.Value] = {}

    def look_up(self, node: ir.Node) -> None:
        """The embedding's rows times their scales."""
        table, ids = node.inputs[0], node.inputs[1]
        assert table is not None
        rows, scale = self._initializer(table, axis=0)
        with self._before(node) as w:
            numbers = w.op("Cast", w.op("Gather", rows, ids), to=ir.DataType.FLOAT.value)
            found = w.op("Mul", numbers, w.op("Unsqueeze", w.op("Gather", scale, ids), w.integers(-1)))
        replace_output(node.outputs[0], found)

    def multiply(self, node: ir.Node) -> None:
        """One product."""
        matrix, scale = self._matrix(node.inputs[1], node)
        rows, row_scale = self._activations(node)
        with self._before(node) as w:
            zero = constant(self._model.graph, "forerun.zero_point", np.array(ZERO_POINT, np.uint8))
            product = w.op("MatMulIntegerToFloat", rows, matrix, w.scalar(1.0), scale, zero, domain=CONTRIB)
            product = w.op("Mul", product, row_scale)
        replace_output(node.outputs[0], product)

    def _before(self, node: ir.Node) -> NodeWriter:
        return NodeWriter(self._model.graph, before=node)

    def _matrix(self, value: ir.Value | None, node: ir.Node) -> tuple[ir.Value, ir.Value]:
        """A constant matrix [K,N] in int8 and its scales [N]."""
        source = initializer_of(value)
        assert source is not None
        if source is value:
            return self._initializer(source, axis=1)
        rows, scale = self._initializer(source, axis=0)
        with self._before(node) as w:
            return w.op("Transpose", rows, perm=(1, 0)), scale

    def _initializer(self, value: ir.Value, *, axis: int) -> tuple[ir.Value, ir.Value]:
        """An initializer in int8 with a scale for each place along `axis`, both computed when they are written."""
        if (value, axis) not in self._weights:
            tensor, graph = value.const_value, self._model.graph
            assert tensor is not None
            shape, name = sizes(tensor), f"{value.name}.int8"
            numbers = derived_weight(name, shape, [tensor], partial(quantized, axis=axis), dtype=ir.DataType.INT8)
            scale = derived_weight(f"{name}.scale", [shape[axis]], [tensor], partial(scales, axis=axis))
            self._weights[value, axis] = register(graph, numbers), register(graph, scale)
        return self._weights[value, axis]

    def _activations(self, node: ir.Node) -> tuple[ir.Value, ir.Value]:
        """What a product reads, [B,S,K], in uint8, and its scales [B,S,1]."""
        x = node.inputs[0]
        assert x is not None
        if x not in self._rows:
            zero = self._row_zero_points("logit_rows" if node is self._head else "input_ids")
            with self._before(node) as w:
                largest = w.op("ReduceMax", w.op("Abs", x), w.integers(-1), keepdims=1)
                # A row of zeros has scale 0: whatever its quotients 0 / 0 become, its products are 0 again.
                scale = w.op("Mul", largest, w.scalar(1 / LARGEST))
                rows = w.op("QuantizeLinear", x, scale, zero, axis=2, block_size=inner_size(node.inputs[1]))
            self._rows[x] = rows, scale
        return self._rows[x]

    def _row_zero_points(self, like: str) -> ir.Value:
        """uint8 [B,S,1], for the B and S of a graph input [B,S]."""
        if like not in self._zero_points:
            with self._before(self._model.graph[0]) as w:
                shape = w.op("Concat", w.op("Shape", graph_input(self._model, like)), w.integers(1), axis=0)
                zero = constant(self._model.graph, "forerun.zero_points", np.full((1, 1, 1), ZERO_POINT, np.uint8))
                self._zero_points[like] = w.op("Expand", zero, shape)
        return self._zero_points[like]


def inner_size(matrix: ir.Value | None) -> int:
    """K of a constant matrix [K,N]."""
    source = initializer_of(matrix)
    tensor = weight(source)
    assert tensor is not None
    return sizes(tensor)[0 if source is matrix else 1]


def scales(matrix: np.ndarray, axis: int) -> np.ndarray:
    """max |w| / 127 at each place along `axis`; 1 where all are 0."""
    largest = np.abs(matrix).max(axis=1 - axis)
    return np.where(largest > 0, largest / np.float32(LARGEST), 1).astype(np.float32)


def quantized(matrix: np.ndarray, axis: int) -> np.ndarray:
    """The nearest whole numbers to w / scale, which lie within -127..127."""
    numbers: np.ndarray = np.rint(matrix / np.expand_dims(scales(matrix, axis), 1 - axis)).astype(np.int8)
    return numbers
