"""Attention over a static cache, in plain operators, with the contract's mask.

The front end's `TensorScatter` ([B,C,H*D]) and `Attention` nodes become, per layer,

    K  = TensorScatter(k_cache.i, k, write_indices)            [B,H,C,D], V alike
    Q' = the G query heads of each KV head laid into rows      [B,H,G*S,D]
    P  = Softmax(scale * Q' K^T + mask)                        [B,H,G*S,C]
    P V, laid back into query heads                            [B,S,H*G*D]

Folding the heads into rows needs no copy of K or V for grouped heads, and every matrix product keeps the same
order of summation whatever S, B and C are, so a row's result is bit-identical in all of them.
"""

import math
from dataclasses import dataclass

import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export.passes.graph_tools import (
    NodeWriter,
    Outcome,
    add_input,
    drop_unused,
    graph_input,
    nodes_of,
    producer,
    replace_output,
)

# The most negative float32 rather than minus infinity: a padding row that sees nothing then stays finite, and its
# keys and values, which may lie in the cache as stale slots, cannot turn 0 * V into NaN. exp() of it is exactly 0.
HIDDEN = -3.4028234663852886e38

_ATTENTION_INPUTS_UNUSED = {
    3: "an attention mask",
    4: "a concatenated key cache",
    5: "a concatenated value cache",
}


@dataclass(frozen=True)
class _Layer:
    """One attention layer: its nodes and its numbers of heads."""

    attention: ir.Node
    scatters: tuple[ir.Node, ir.Node]
    query_heads: int
    kv_heads: int
    head_size: int
    scale: float
    softcap: float

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads


def apply(model: ir.Model) -> Outcome:
    """Rewrite every attention layer. Raises ExportError where one cannot be expressed."""
    attentions = nodes_of(model, "Attention")
    if not attentions:
        return Outcome(False, "the graph has no Attention node")
    layers = [_read_layer(node, number) for number, node in enumerate(attentions)]
    groups = {layer.group for layer in layers}
    if len(groups) > 1:
        raise ExportError(f"layers group their query heads differently ({sorted(groups)}); choose another model")
    mask = _write_mask(model, layers[0])
    for layer in layers:
        _rewrite(model, layer, mask)
    drop_unused(model)
    return Outcome(True)


def _read_layer(node: ir.Node, number: int) -> _Layer:
    for position, what in _ATTENTION_INPUTS_UNUSED.items():
        if len(node.inputs) > position and node.inputs[position] is not None:
            raise _refusal(number, f"it uses {what} (a sliding window or another mask)")
    keys, values = (producer(node.inputs[position], "TensorScatter") for position in (1, 2))
    if keys is None or values is None:
        raise _refusal(number, "its keys and values do not come from a static cache (TensorScatter)")
    if node.attributes.get_int("is_causal", 0) != 1:
        raise _refusal(number, "it is not causal")
    if any(output.uses() for output in node.outputs[1:]):
        raise _refusal(number, "its scores or concatenated caches are read elsewhere")
    for scatter in (keys, values):
        _check_scatter(scatter, number)
    return _layer_numbers(node, (keys, values), number)


def _check_scatter(scatter: ir.Node, number: int) -> None:
    if scatter.attributes.get_string("mode", "linear") != "linear":
        raise _refusal(number, "its cache is circular (a sliding window)")
    if scatter.attributes.get_int("axis", -2) not in (1, -2):
        raise _refusal(number, "its cache is not laid out as [B,C,H*D]")
    cache = scatter.inputs[0]
    if cache is None or not cache.is_graph_input() or cache.shape is None or len(cache.shape) != 3:
        raise _refusal(number, "its cache is not a graph input of shape [B,C,H*D]")


def _layer_numbers(node: ir.Node, scatters: tuple[ir.Node, ir.Node], number: int) -> _Layer:
    query_heads = node.attributes.get_int("q_num_heads", 0)
    kv_heads = node.attributes.get_int("kv_num_heads", 0)
    widths = [int(scatter.inputs[0].shape[2]) for scatter in scatters]  # type: ignore[union-attr, index, arg-type]
    if kv_heads == 0 or query_heads % kv_heads or widths[0] % kv_heads or widths[0] != widths[1]:
        raise _refusal(number, f"{query_heads} query heads, {kv_heads} KV heads and caches {widths} wide do not fit")
    head_size = widths[0] // kv_heads
    scale = node.attributes.get_float("scale", 1 / math.sqrt(head_size))
    return _Layer(node, scatters, query_heads, kv_heads, head_size, scale, node.attributes.get_float("softcap", 0.0))


def _refusal(number: int, why: str) -> ExportError:
    return ExportError(f"attention layer {number} cannot be exported: {why}; choose a model without it")


def _write_mask(model: ir.Model, layer: _Layer) -> ir.Value:
    """The additive mask [B,1,G*S,C] of all layers: 0 where a new token sees a slot, else HIDDEN.

    Slot j is seen by new token s of a row with write index w if j < w, or if 0 <= j - w < S and tree_mask[s, j - w].
    """
    ids, write = graph_input(model, "input_ids"), graph_input(model, "write_indices")
    tree = add_input(model, "tree_mask", ir.DataType.BOOL, ["B", "S", "S"])
    cache = layer.scatters[0].inputs[0]
    first = next(iter(model.graph))
    with NodeWriter(model.graph, before=first) as w:
        new_tokens = w.op("Shape", ids, start=1, end=2, name="mask.new_tokens")
        capacity = w.op("Shape", cache, start=2, end=3, name="mask.capacity")
        batch = w.op("Shape", ids, start=0, end=1)
        slots = w.op("Range", w.scalar(0), w.op("Squeeze", capacity), w.scalar(1), name="mask.slots")
        offset = w.op("Sub", slots, w.op("Unsqueeze", write, w.integers(1, 2)), name="mask.offset")  # [B,1,C]
        index = w.op("Min", w.op("Max", offset, w.scalar(0)), w.op("Sub", new_tokens, w.scalar(1)))
        index = w.op("Expand", index, w.op("Concat", batch, new_tokens, capacity, axis=0), name="mask.index")
        sees_new = w.op("GatherElements", tree, index, axis=2, name="mask.sees_new")  # [B,S,C]
        sees_new = w.op("And", sees_new, w.op("Less", offset, new_tokens))
        seen = w.op("Or", sees_new, w.op("Less", offset, w.scalar(0)), name="mask.seen")
        mask = w.op("Where", seen, w.scalar(0.0), w.scalar(HIDDEN))
        if layer.group > 1:
            mask = w.op("Tile", mask, w.integers(1, layer.group, 1))  # row g * S + s
        return w.op("Unsqueeze", _never_one_row(w, mask, layer, axis=1), w.integers(1), name="mask")


def _never_one_row(w: NodeWriter, rows: ir.Value, layer: _Layer, *, axis: int) -> ir.Value:
    """Repeat the first row behind the last one where there may be only one (no grouped heads, S = 1).

    onnxruntime's CPU kernels multiply a single row by another routine, which sums in another order; with two rows
    every call takes the same one. The extra row is cut off again after attention.
    """
    if layer.group > 1:
        return rows
    first = w.op("Slice", rows, w.integers(0), w.integers(1), w.integers(axis))
    return w.op("Concat", rows, first, axis=axis)


def _rewrite(model: ir.Model, layer: _Layer, mask: ir.Value) -> None:
    node = layer.attention
    name = node.outputs[0].name
    with NodeWriter(model.graph, before=node) as w:
        keys, values = (_write_cache(w, layer, scatter) for scatter in layer.scatters)
        query = _never_one_row(w, _fold_heads(w, layer, node.inputs[0]), layer, axis=2)
        transposed = w.op("Transpose", keys, perm=(0, 1, 3, 2))
        scores = w.op("Mul", w.op("MatMul", query, transposed), w.scalar(layer.scale), name=f"{name}.scores")
        if layer.softcap:
            capped = w.op("Tanh", w.op("Div", scores, w.scalar(layer.softcap)))
            scores = w.op("Mul", capped, w.scalar(layer.softcap))
        weights = w.op("Softmax", w.op("Add", scores, mask), axis=-1, name=f"{name}.weights")
        mixed = _unfold_heads(w, layer, w.op("MatMul", weights, values))
    replace_output(node.outputs[0], mixed)
    for scatter, new in zip(layer.scatters, (keys, values), strict=True):
        replace_output(scatter.outputs[0], new)


def _write_cache(w: NodeWriter, layer: _Layer, scatter: ir.Node) -> ir.Value:
    """The new keys or values [B,S,H*D] written into the cache, whose input becomes [B,H,C,D]."""
    cache, new, write = scatter.inputs
    assert cache is not None
    cache.shape = ir.Shape(["B", layer.kv_heads, "C", layer.head_size])
    split = w.op("Reshape", new, w.integers(0, 0, layer.kv_heads, layer.head_size))
    heads_first = w.op("Transpose", split, perm=(0, 2, 1, 3))
    written = w.op("TensorScatter", cache, heads_first, write, axis=2)
    written.shape, written.type = cache.shape, cache.type
    return written


def _fold_heads(w: NodeWriter, layer: _Layer, query: ir.Value | None) -> ir.Value:
    """[B,S,H*G*D] -> [B,H,G*S,D]: row g * S + s of KV head h is token s of query head h * G + g."""
    if layer.group == 1:
        split = w.op("Reshape", query, w.integers(0, 0, layer.kv_heads, layer.head_size))
        return w.op("Transpose", split, perm=(0, 2, 1, 3))
    split = w.op("Reshape", query, w.integers(0, 0, layer.kv_heads, layer.group, layer.head_size))
    heads_first = w.op("Transpose", split, perm=(0, 2, 3, 1, 4))
    return w.op("Reshape", heads_first, w.integers(0, 0, -1, layer.head_size))


def _unfold_heads(w: NodeWriter, layer: _Layer, mixed: ir.Value) -> ir.Value:
    """The inverse of `_fold_heads`, without the row that `_never_one_row` added."""
    width = layer.query_heads * layer.head_size
    if layer.group == 1:
        mixed = w.op("Slice", mixed, w.integers(0), w.integers(-1), w.integers(2))
        split = w.op("Transpose", mixed, perm=(0, 2, 1, 3))
    else:
        rows = w.op("Reshape", mixed, w.integers(0, 0, layer.group, -1, layer.head_size))
        split = w.op("Transpose", rows, perm=(0, 3, 1, 2, 4))
    return w.op("Reshape", split, w.integers(0, 0, width))
