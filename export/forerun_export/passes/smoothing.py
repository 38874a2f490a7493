"""Activations that int8 holds better: each input channel of a product divided by c, its weights times c.

    c[k] = sqrt(max |x_k| / max_n |W[k,n]|)        (Xiao et al. 2211.10438, alpha = 1/2)

A row has one scale for all its channels, so a channel with large values leaves few numbers to the others. The
division costs nothing where what makes the input can be divided instead: the weights of a norm, or those columns
of the product before that reach the input linearly. A tied embedding is multiplied with its head, and divided again
where it is looked up.
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from forerun_export.passes.graph_tools import (
    NodeWriter,
    Outcome,
    constant,
    derived_weight,
    nodes_of,
    only_consumer,
    producer,
    sizes,
    weight,
)
from forerun_export.passes.int8_weights import initializer_of, is_constant

LEAST, MOST = 1e-3, 1e3
"""Bounds of c beside its geometric mean."""


def apply(model: ir.Model, *, largest_inputs: Mapping[str, np.ndarray]) -> Outcome:
    """Smooth the inputs of products with constant matrices, by the largest |x| [K] of each weight's input."""
    products = [node for node in nodes_of(model, "MatMul") if is_constant(node.inputs[1])]
    changed = [node for node in products if _smooth(model, node, largest_inputs)]
    return Outcome(bool(changed), "" if changed else "no product's input is made by what could be divided")


def _smooth(model: ir.Model, node: ir.Node, largest_inputs: Mapping[str, np.ndarray]) -> bool:
    x, matrix = node.inputs[0], initializer_of(node.inputs[1])
    assert x is not None
    assert matrix is not None
    tensor, axis = weight(matrix), 0 if matrix is node.inputs[1] else 1
    divided = _divisible(x) if only_consumer(x) is node else None
    if tensor is None or divided is None or str(matrix.name) not in largest_inputs:
        return False
    c = factors(largest_inputs[str(matrix.name)], np.abs(tensor.numpy()).max(axis=1 - axis))
    before, columns = divided
    _multiply(before, 1 / c, axis=-1, part=columns)
    _multiply(matrix, c, axis=axis)
    for lookup in [user for user, _ in matrix.uses() if user.op_type == "Gather"]:
        _divide_lookup(model, lookup, c)
    return True


def factors(largest_input: np.ndarray, largest_weight: np.ndarray) -> np.ndarray:
    """c [K]; a channel that never says anything, or is never heard, keeps its values."""
    usable = (largest_input > 0) & (largest_weight > 0)
    c = np.sqrt(np.divide(largest_input, largest_weight, out=np.ones_like(largest_input), where=usable))
    mean = np.exp(np.log(c[usable]).mean()) if usable.any() else 1.0
    factors: np.ndarray = np.where(usable, np.clip(c / mean, LEAST, MOST), 1).astype(np.float32)
    return factors


Divisible: TypeAlias = tuple[ir.Value, slice]
"""An initializer and the part of its last axis on which the input of a product depends linearly."""


def _divisible(x: ir.Value) -> Divisible | None:
    norm, gated = producer(x, "RMSNormalization"), producer(x, "Mul")
    if norm is not None:
        gain = norm.inputs[1]
        return (gain, slice(None)) if gain is not None and weight(gain) is not None and len(gain.uses()) == 1 else None
    operands = [value for value in gated.inputs if value is not None] if gated is not None else []
    found = [columns for value in operands if only_consumer(value) is gated and (columns := _columns(value))]
    return found[0] if found else None


def _columns(value: ir.Value) -> Divisible | None:
    """The columns of the product that makes a value, which may be a part of fused projections."""
    split, columns = producer(value, "Split"), slice(None)
    if split is not None:
        widths = weight(split.inputs[1])
        source = split.inputs[0]
        if widths is None or source is None or only_consumer(source) is not split:
            return None
        ends = np.cumsum(widths.numpy())
        place = list(split.outputs).index(value)
        columns, value = slice(int(ends[place] - widths.numpy()[place]), int(ends[place])), source
    product = producer(value, "MatMul")
    matrix = product.inputs[1] if product is not None else None
    return (matrix, columns) if matrix is not None and weight(matrix) is not None else None


def _multiply(value: ir.Value, numbers: np.ndarray, *, axis: int, part: slice = slice(None)) -> None:
    """Multiply a part of the last axis of an initializer, or all of it along another axis, when it is written."""
    tensor = weight(value)
    assert tensor is not None

    def rule(array: np.ndarray) -> np.ndarray:
        product = array.copy()
        product[..., part] *= numbers if axis in (-1, array.ndim - 1) else numbers[:, None]
        return product

    value.const_value = derived_weight(str(value.name), sizes(tensor), [tensor], rule)


def _divide_lookup(model: ir.Model, lookup: ir.Node, c: np.ndarray) -> None:
    found = lookup.outputs[0]
    readers = list(found.uses())
    inverse = constant(model.graph, f"{lookup.inputs[0].name}.inverse", 1 / c)  # type: ignore[union-attr]
    with NodeWriter(model.graph, after=lookup) as w:
        restored = w.op("Mul", found, inverse)
    for reader, place in readers:
        reader.replace_input_with(place, restored)
