"""Weights in 4 bits, in blocks of 32 with a scale and a zero point each: int4.

    W[k,n] = scale[n,k // 32] * (Q[n,k] - zero[n,k // 32])        Q and zero in 0..15

MatMulNBits, onnxruntime's own operator for its CPU provider, multiplies them with activations in int8 that have a
scale for each row and block (accuracy level 4; without it, activations stay float32 and products take several times
as long). Blocks of 32 keep rows bit-identical whatever B and S are; longer ones do not.

A block's scale is the one of a few (SPANS) that comes closest to its weights, so that a single large weight does not
make a block coarse, and then the best for the numbers chosen. Zero points cost no time and a third of the divergence
from float32.

Left to int8: the head, which in 4 bits would double the divergence (0.5B parameters) and save a twentieth of a pass's
weights; and what 4 bits cannot hold in whole blocks.
"""

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
LARGEST = 15
# How much of the way from the least to the largest weight the numbers span; beyond their ends weights are clipped.
SPANS = (1.04, 1.0, 0.96, 0.92, 0.88, 0.84)
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
    tensors = _Blocks(matrix).tensors()
    with NodeWriter(model.graph, before=node) as w:
        product = w.op(
            "MatMulNBits",
            node.inputs[0],
            *(register(model.graph, tensor) for tensor in tensors),
            domain=CONTRIB,
            K=inner,
            N=width,
            bits=4,
            block_size=BLOCK,
            accuracy_level=4,
        )
    replace_output(node.outputs[0], product)


class _Blocks:
    """One matrix in 4 bits, computed when it is written: the numbers first, and with them scales and zero points."""

    def __init__(self, matrix: ir.TensorProtocol) -> None:
        self._matrix = matrix
        self._rest: tuple[np.ndarray, np.ndarray] | None = None

    def tensors(self) -> list[ir.TensorProtocol]:
        """As MatMulNBits reads them: numbers [N,K/32,16], scales [N,K/32], zero points [N,K/64] rounded up."""
        inner, width = sizes(self._matrix)
        blocks = inner // BLOCK
        parts = (
            ("", [width, blocks, BLOCK // 2], ir.DataType.UINT8, self._numbers),
            (".scale", [width, blocks], ir.DataType.FLOAT, self._scale),
            (".zero", [width, -(-blocks // 2)], ir.DataType.UINT8, self._zero),
        )
        name = f"{self._matrix.name}.int4"
        return [
            derived_weight(f"{name}{suffix}", shape, [self._matrix], rule, dtype=dtype)
            for suffix, shape, dtype, rule in parts
        ]

    def _numbers(self, matrix: np.ndarray) -> np.ndarray:
        numbers, *rest = quantized(matrix)
        self._rest = rest[0], rest[1]
        return packed(numbers)

    def _scale(self, matrix: np.ndarray) -> np.ndarray:
        return (self._rest or quantized(matrix)[1:])[0]

    def _zero(self, matrix: np.ndarray) -> np.ndarray:
        return packed((self._rest or quantized(matrix)[1:])[1])


def packed(numbers: np.ndarray) -> np.ndarray:
    """Two neighbours of the last axis in a byte, the even one in its lower half; an odd last one beside 0."""
    odd = numbers.shape[-1] % 2
    even = np.concatenate([numbers, np.zeros_like(numbers[..., :1])], axis=-1) if odd else numbers
    halves: np.ndarray = even[..., 0::2] | (even[..., 1::2] << 4)
    return halves


def quantized(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q [N,K/32,32], the scales [N,K/32] and the zero points [N,K/32] of a matrix [K,N]."""
    width = matrix.shape[1]
    blocks = np.ascontiguousarray(matrix.T).reshape(-1, BLOCK)
    parts = [_quantized_blocks(blocks[start : start + _AT_ONCE]) for start in range(0, len(blocks), _AT_ONCE)]
    numbers, scale, zero = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return numbers.reshape(width, -1, BLOCK), scale.reshape(width, -1), zero.reshape(width, -1)


def _quantized_blocks(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q, scales and zero points of some blocks [blocks,32]; zero is always one of the numbers."""
    low = blocks.min(axis=1, keepdims=True, initial=0)
    step = (blocks.max(axis=1, keepdims=True, initial=0) - low) / np.float32(LARGEST)
    zero = np.rint(_quotient(-low, step))
    scale, least = np.zeros_like(step), np.full_like(step, np.inf)
    for span in SPANS:
        tried = step * np.float32(span)
        error = _rounded(blocks, tried, zero) * tried - blocks
        squared = np.einsum("ij,ij->i", error, error)[:, None]
        scale, least = np.where(squared < least, tried, scale), np.minimum(squared, least)
    numbers = _rounded(blocks, scale, zero)
    scale = _quotient(_row_sums(numbers, blocks), _row_sums(numbers, numbers))  # least squares
    numbers = _rounded(blocks, scale, zero) + zero
    return numbers.astype(np.uint8), scale[:, 0], zero[:, 0].astype(np.uint8)


def _rounded(blocks: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Q - zero: the nearest number to each weight over its scale; 0 where the scale is 0, as is the block then."""
    numbers: np.ndarray = np.rint(blocks * _quotient(np.ones_like(scale), scale))
    return numbers.clip(-zero, LARGEST - zero, out=numbers)


def _quotient(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    quotient: np.ndarray = np.divide(above, below, out=np.zeros_like(below), where=below != 0)
    return quotient


def _row_sums(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    sums: np.ndarray = np.einsum("ij,ij->i", one, other)[:, None]
    return sums
