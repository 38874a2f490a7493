"""Weights in 4 bits, in blocks of 32 with a scale each: int4.

    W[k,n] = scale[n,k // 32] * (Q[n,k] - 8)        Q in 0..15

MatMulNBits, onnxruntime's own operator for its CPU provider, multiplies them with activations in int8 that have a
scale for each row and block (accuracy level 4; without it, activations stay float32 and products take several times
as long). Blocks of 32 keep rows bit-identical whatever B and S are; blocks of 128 do not.

The scale of a block is that one of a few (DIVISORS) which comes closest to its weights, so that a single large weight
does not make a block coarse.

Left to int8: the head, whose errors reach the logits directly; and what 4 bits cannot hold in whole blocks.
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from forerun_export.passes.graph_tools import (
    CONTRIB,
    NodeWriter,
    Outcome,
    derived_weight,
    drop_unused,
    head,
    nodes_of,
    register,
    replace_output,
    sizes,
    weight,
)

BLOCK = 32
ZERO_POINT = 8
# The largest weight is this many times the scale. -8 is a number of 4 bits, 8 is not: the largest weight may have
# either sign. Beyond -8 it is clipped, and the others are rounded less.
DIVISORS = (-7.0, -7.5, -8.0, -8.5, -9.0, 7.5, 8.0)
_AT_ONCE = 1 << 12  # blocks: few enough to stay in a processor's cache


def apply(model: ir.Model) -> Outcome:
    """Quantize every product with a constant matrix of whole blocks but the head."""
    last = head(model)
    products = [node for node in nodes_of(model, "MatMul") if node is not last and _has_whole_blocks(node)]
    for node in products:
        _rewrite(model, node)
    drop_unused(model)
    if products:
        model.opset_imports[CONTRIB] = 1
    return Outcome(bool(products), "" if products else f"no product has a constant matrix of whole blocks of {BLOCK}")


def _has_whole_blocks(node: ir.Node) -> bool:
    matrix = weight(node.inputs[1])
    return matrix is not None and len(matrix.shape) == 2 and sizes(matrix)[0] % BLOCK == 0


def _rewrite(model: ir.Model, node: ir.Node) -> None:
    matrix = weight(node.inputs[1])
    assert matrix is not None
    inner, width = sizes(matrix)
    blocks = _Blocks(matrix)
    numbers = blocks.tensor(".int4", [width, inner // BLOCK, BLOCK // 2], ir.DataType.UINT8, blocks.packed)
    scale = blocks.tensor(".int4.scale", [width, inner // BLOCK], ir.DataType.FLOAT, blocks.scale)
    with NodeWriter(model.graph, before=node) as w:
        product = w.op(
            "MatMulNBits",
            node.inputs[0],
            register(model.graph, numbers),
            register(model.graph, scale),
            domain=CONTRIB,
            K=inner,
            N=width,
            bits=4,
            block_size=BLOCK,
            accuracy_level=4,
        )
    replace_output(node.outputs[0], product)


class _Blocks:
    """One matrix in 4 bits, computed when it is written: the numbers first, and with them the scales."""

    def __init__(self, matrix: ir.TensorProtocol) -> None:
        self._matrix = matrix
        self._scale: np.ndarray | None = None

    def tensor(
        self, suffix: str, shape: list[int], dtype: ir.DataType, rule: Callable[[np.ndarray], np.ndarray]
    ) -> ir.TensorProtocol:
        """A weight made by `rule`, named after the matrix."""
        return derived_weight(f"{self._matrix.name}{suffix}", shape, [self._matrix], rule, dtype=dtype)

    def packed(self, matrix: np.ndarray) -> np.ndarray:
        """Q as MatMulNBits reads it, [N,K/32,16]: the even of two neighbours in the lower half of a byte."""
        numbers, self._scale = quantized(matrix)
        halves: np.ndarray = numbers[..., 0::2] | (numbers[..., 1::2] << 4)
        return halves

    def scale(self, matrix: np.ndarray) -> np.ndarray:
        """The scales [N,K/32]."""
        return quantized(matrix)[1] if self._scale is None else self._scale


def quantized(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q [N,K/32,32] and the scales [N,K/32] of a matrix [K,N]."""
    width = matrix.shape[1]
    blocks = np.ascontiguousarray(matrix.T).reshape(-1, BLOCK)
    parts = [_quantized_blocks(blocks[start : start + _AT_ONCE]) for start in range(0, len(blocks), _AT_ONCE)]
    numbers, scale = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return numbers.reshape(width, -1, BLOCK), scale.reshape(width, -1)


def _quantized_blocks(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q and the scales of some blocks [blocks,32], each with the candidate whose squared error is least."""
    place = np.abs(blocks).argmax(axis=1, keepdims=True)
    largest = np.take_along_axis(blocks, place, axis=1)
    scale, least = np.zeros_like(largest), np.full_like(largest, np.inf)
    for divisor in DIVISORS:
        tried = largest / np.float32(divisor)
        error = _rounded(blocks, tried) * tried - blocks
        squared = np.einsum("ij,ij->i", error, error)[:, None]
        scale, least = np.where(squared < least, tried, scale), np.minimum(squared, least)
    return (_rounded(blocks, scale) + ZERO_POINT).astype(np.uint8), scale[:, 0]


def _rounded(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The nearest of -8..7 to each weight over its scale; 0 where the scale is 0, as is the block then."""
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    numbers: np.ndarray = np.rint(blocks * inverse)
    return numbers.clip(-ZERO_POINT, ZERO_POINT - 1, out=numbers)
