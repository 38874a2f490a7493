"""Attention over a static cache in plain operators, with the contract's mask: what every front end's attention becomes.

Per layer, with H KV heads and G query heads to each,

    K  = TensorScatter(k_cache.i, k, write_indices)            [B,H,C,D], V alike
    Q' = the G query heads of each KV head laid into rows      [B,H,G*S,D]
    P  = Softmax(scale * Q' K^T + mask)                        [B,H,G*S,C]
    P V, laid back into query heads                            [B,H*G,S,D]

Folding the heads into rows needs no copy of K or V for grouped heads, and every matrix product keeps the same
order of summation whatever S, B and C are, so a row's result is bit-identical in all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from forerun.contract import cache_shape
from forerun_export.passes.graph_tools import (
    NodeWriter,
    add_input,
    constant,
    drop_unused,
    graph_input,
    replace_output,
)

# The most negative float32 rather than minus infinity: a padding row that sees nothing then stays finite, and its
# keys and values, which may lie in the cache as stale slots, cannot turn 0 * V into NaN. exp() of it is exactly 0.
HIDDEN = -3.4028234663852886e38


@dataclass(frozen=True)
class NewEntries:
    """Keys or values of the new tokens, the cache that they go to, and the value that stood for the cache with them.

    `new` is [B,S,H*D], or [B,H,S,D] if the layer has its heads first.
    """

    new: ir.Value
    cache: ir.Value
    written: ir.Value


@dataclass(frozen=True)
class Visibility:
    """Which of the earlier tokens a token sees, and how a head weighs their distance.

    `window`: only the last so many tokens, itself included (None: all). `slopes`: what each query head subtracts
    from a score for each token of distance (ALiBi, Press et al. 2108.12409); empty: nothing.
    """

    window: int | None = None
    slopes: tuple[float, ...] = ()


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a front end's graph, to be written anew right before the node `before`.

    `query` and `output` are [B,S,H*G*D], or [B,H*G,S,D] with `heads_first`.
    """

    before: ir.Node
    query: ir.Value
    keys: NewEntries
    values: NewEntries
    output: ir.Value
    heads_first: bool
    query_heads: int
    kv_heads: int
    head_size: int
    scale: float
    softcap: float = 0.0
    visibility: Visibility = Visibility()

    @property
    def group(self) -> int:
        """G: the query heads of each KV head."""
        return self.query_heads // self.kv_heads


def write(model: ir.Model, layers: Sequence[AttentionLayer]) -> None:
    """Replace every layer; masks are made once for all layers that see alike."""
    masks = _Masks(model, layers)
    for layer in layers:
        _write_layer(model, layer, masks.of(layer))
    drop_unused(model)


class _Masks:
    """The additive masks [B,1,G*S,C] (or [B,H,G*S,C] with slopes): 0 or a bias where a slot is seen, else HIDDEN.

    Slot j is seen by new token s of a row with write index w if j < w, or if 0 <= j - w < S and tree_mask[s, j - w].
    """

    def __init__(self, model: ir.Model, layers: Sequence[AttentionLayer]) -> None:
        self._graph = model.graph
        self._ids, self._write = graph_input(model, "input_ids"), graph_input(model, "write_indices")
        self._tree = add_input(model, "tree_mask", ir.DataType.BOOL, ["B", "S", "S"])
        self._positions = add_input(model, "position_ids", ir.DataType.INT64, ["B", "S"])
        self._first = next(iter(model.graph))
        self._made: dict[tuple[Visibility, int, int], ir.Value] = {}
        with NodeWriter(self._graph, before=self._first) as w:
            self._new_tokens = w.op("Shape", self._ids, start=1, end=2, name="mask.new_tokens")
            self._capacity = w.op("Shape", layers[0].keys.cache, start=2, end=3, name="mask.capacity")
            batch = w.op("Shape", self._ids, start=0, end=1)
            slots = w.op("Range", w.scalar(0), w.op("Squeeze", self._capacity), w.scalar(1), name="mask.slots")
            write = w.op("Unsqueeze", self._write, w.integers(1, 2))
            self._offset = w.op("Sub", slots, write, name="mask.offset")  # [B,1,C]
            index = w.op("Min", w.op("Max", self._offset, w.scalar(0)), w.op("Sub", self._new_tokens, w.scalar(1)))
            self._index = index
            index = w.op("Expand", index, w.op("Concat", batch, self._new_tokens, self._capacity, axis=0))
            sees_new = w.op("GatherElements", self._tree, index, axis=2, name="mask.sees_new")  # [B,S,C]
            sees_new = w.op("And", sees_new, w.op("Less", self._offset, self._new_tokens))
            self._seen = w.op("Or", sees_new, w.op("Less", self._offset, w.scalar(0)), name="mask.seen")
        if any(layer.visibility != Visibility() for layer in layers):
            self._distance = self._write_distance()

    def of(self, layer: AttentionLayer) -> ir.Value:
        """The mask of one layer, made on first use."""
        key = layer.visibility, layer.kv_heads, layer.group
        if key not in self._made:
            with NodeWriter(self._graph, before=self._first) as w:
                self._made[key] = self._mask(w, layer, f"mask.{len(self._made)}" if self._made else "mask")
        return self._made[key]

    def _mask(self, w: NodeWriter, layer: AttentionLayer, name: str) -> ir.Value:
        seen = self._seen
        if layer.visibility.window is not None:
            seen = w.op("And", seen, w.op("Less", self._distance, w.scalar(layer.visibility.window)))
        mask = w.op("Where", seen, w.scalar(0.0), w.scalar(HIDDEN))
        if layer.visibility.slopes:
            return _never_one_row(w, self._biased(w, layer, mask), layer, axis=2, name=name)
        if layer.group > 1:
            mask = w.op("Tile", mask, w.integers(1, layer.group, 1))  # row g * S + s
        return w.op("Unsqueeze", _never_one_row(w, mask, layer, axis=1), w.integers(1), name=name)

    def _biased(self, w: NodeWriter, layer: AttentionLayer, mask: ir.Value) -> ir.Value:
        """mask[b,s,j] - slope[h * G + g] * distance[b,s,j], at [b,h,g * S + s,j]."""
        slopes = np.array(layer.visibility.slopes, np.float32).reshape(1, layer.kv_heads, layer.group, 1, 1)
        named = constant(self._graph, f"mask.slopes.{layer.before.name}", -slopes)
        distance = w.op("Cast", w.op("Unsqueeze", self._distance, w.integers(1, 2)), to=int(ir.DataType.FLOAT))
        biased = w.op("Add", w.op("Mul", named, distance), w.op("Unsqueeze", mask, w.integers(1, 2)))
        return w.op("Reshape", biased, w.op("Concat", w.integers(0, 0, -1), self._capacity, axis=0))

    def _write_distance(self) -> ir.Value:
        """How many positions slot j lies before new token s: int64 [B,S,C].

        Slots below the write index hold the tokens right before the first new one.
        """
        with NodeWriter(self._graph, before=self._first) as w:
            first = w.op("Slice", self._positions, w.integers(0), w.integers(1), w.integers(1))  # [B,1]
            before = w.op("Add", self._offset, w.op("Unsqueeze", first, w.integers(2)))
            new = w.op("GatherElements", self._positions, w.op("Squeeze", self._index, w.integers(1)), axis=1)
            is_new = w.op("GreaterOrEqual", self._offset, w.scalar(0))
            places = w.op("Where", is_new, w.op("Unsqueeze", new, w.integers(1)), before)  # [B,1,C]
            own = w.op("Unsqueeze", self._positions, w.integers(2))
            return w.op("Sub", own, places, name="mask.distance")


def _never_one_row(
    w: NodeWriter, rows: ir.Value, layer: AttentionLayer, *, axis: int, name: str | None = None
) -> ir.Value:
    """Repeat the first row behind the last one where there may be only one (no grouped heads, S = 1).

    onnxruntime's CPU kernels multiply a single row by another routine, which sums in another order; with two rows
    every call takes the same one. The extra row is cut off again after attention.
    """
    if layer.group > 1:
        return rows
    first = w.op("Slice", rows, w.integers(0), w.integers(1), w.integers(axis))
    return w.op("Concat", rows, first, axis=axis, name=name)


def _write_layer(model: ir.Model, layer: AttentionLayer, mask: ir.Value) -> None:
    name = layer.output.name
    with NodeWriter(model.graph, before=layer.before) as w:
        write = graph_input(model, "write_indices")
        keys, values = (_write_cache(w, layer, entries, write) for entries in (layer.keys, layer.values))
        query = _never_one_row(w, _fold_heads(w, layer), layer, axis=2)
        transposed = w.op("Transpose", keys, perm=(0, 1, 3, 2))
        scores = w.op("Mul", w.op("MatMul", query, transposed), w.scalar(layer.scale), name=f"{name}.scores")
        if layer.softcap:
            capped = w.op("Tanh", w.op("Div", scores, w.scalar(layer.softcap)))
            scores = w.op("Mul", capped, w.scalar(layer.softcap))
        weights = w.op("Softmax", w.op("Add", scores, mask), axis=-1, name=f"{name}.weights")
        mixed = _unfold_heads(w, layer, w.op("MatMul", weights, values))
    replace_output(layer.output, mixed)
    for entries, new in zip((layer.keys, layer.values), (keys, values), strict=True):
        replace_output(entries.written, new)
        new.shape, new.type = entries.cache.shape, entries.cache.type  # not those of a cache in the front end's layout


def _write_cache(w: NodeWriter, layer: AttentionLayer, entries: NewEntries, write: ir.Value) -> ir.Value:
    """The new keys or values written into the cache, whose input becomes [B,H,C,D]."""
    cache, heads_first = entries.cache, entries.new
    cache.shape = ir.Shape(cache_shape(layer.kv_heads, layer.head_size))
    if not layer.heads_first:
        split = w.op("Reshape", entries.new, w.integers(0, 0, layer.kv_heads, layer.head_size))
        heads_first = w.op("Transpose", split, perm=(0, 2, 1, 3))
    return w.op("TensorScatter", cache, heads_first, write, axis=2)


def _fold_heads(w: NodeWriter, layer: AttentionLayer) -> ir.Value:
    """The queries as [B,H,G*S,D]: row g * S + s of KV head h is token s of query head h * G + g."""
    query, rows = layer.query, w.integers(0, layer.kv_heads, -1, layer.head_size)
    if layer.heads_first:
        return query if layer.group == 1 else w.op("Reshape", query, rows)
    if layer.group == 1:
        split = w.op("Reshape", query, w.integers(0, 0, layer.kv_heads, layer.head_size))
        return w.op("Transpose", split, perm=(0, 2, 1, 3))
    split = w.op("Reshape", query, w.integers(0, 0, layer.kv_heads, layer.group, layer.head_size))
    heads_first = w.op("Transpose", split, perm=(0, 2, 3, 1, 4))
    return w.op("Reshape", heads_first, w.integers(0, 0, -1, layer.head_size))


def _unfold_heads(w: NodeWriter, layer: AttentionLayer, mixed: ir.Value) -> ir.Value:
    """The inverse of `_fold_heads`, without the row that `_never_one_row` added."""
    width = layer.query_heads * layer.head_size
    if layer.group == 1:
        mixed = w.op("Slice", mixed, w.integers(0), w.integers(-1), w.integers(2))
        if layer.heads_first:
            return mixed
        split = w.op("Transpose", mixed, perm=(0, 2, 1, 3))
    elif layer.heads_first:
        return w.op("Reshape", mixed, w.integers(0, layer.query_heads, -1, layer.head_size))
    else:
        rows = w.op("Reshape", mixed, w.integers(0, 0, layer.group, -1, layer.head_size))
        split = w.op("Transpose", rows, perm=(0, 3, 1, 2, 4))
    return w.op("Reshape", split, w.integers(0, 0, width))
