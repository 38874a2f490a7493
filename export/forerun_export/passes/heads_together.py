"""Fused q, k and v split by heads once, and q and k turned together: fewer nodes for the same numbers.

    before   Split -> q, k, v [B,S,heads*D];  RotaryEmbedding of q, of k;  each laid out by heads on its own
    after    laid out by heads [B,heads,S,D];  RotaryEmbedding of q and k;  Split -> q, k, v

Rotary positions treat each head by itself, so every bit stays. A node costs some microseconds whatever it does, and
with one new token a layer's attention is mostly such nodes: of its thirty, four go
(a twentieth of a step of SmolLM2 in int4).

It fires on what `fuse_projections` and `static_attention` leave of a layer whose q and k have the same positions and
whose query heads share KV heads; a layer of any other kind is left as it is.
"""

from dataclasses import dataclass

import onnx_ir as ir

from forerun_export.passes.graph_tools import (
    NodeWriter,
    Outcome,
    drop_unused,
    nodes_of,
    only_consumer,
    replace_output,
    weight,
)

_FOLD, _BY_HEADS = (0, 2, 3, 1, 4), (0, 2, 1, 3)


@dataclass(frozen=True)
class _Layer:
    """q, k and v of one attention layer, from their Split to the values that the products and the caches read.

    `turned` are the RotaryEmbedding nodes of q and k; `ends` the reshape of q to [B,H,G*S,D] and the transposes of k
    and v to [B,H,S,D]; `heads` how many of q and of k.
    """

    split: ir.Node
    turned: tuple[ir.Node, ir.Node]
    ends: tuple[ir.Node, ir.Node, ir.Node]
    heads: tuple[int, int]


def apply(model: ir.Model) -> Outcome:
    """Rewrite every layer of that form."""
    splits = [node for node in nodes_of(model, "Split") if len(node.outputs) == 3]
    layers = [layer for split in splits if (layer := _read_layer(split)) is not None]
    for layer in layers:
        _rewrite(model, layer)
    drop_unused(model)
    reason = f"none of {len(splits)} splits in three is one of q, k and v by grouped heads that turn alike"
    return Outcome(bool(layers), "" if layers else reason)


def _read_layer(split: ir.Node) -> _Layer | None:
    query, key, value = split.outputs
    turned_query, turned_key = _reader(query, "RotaryEmbedding"), _reader(key, "RotaryEmbedding")
    if turned_query is None or turned_key is None or not _turn_alike(turned_query, turned_key):
        return None
    query_end = _reader(_laid_out(turned_query.outputs[0], _FOLD), "Reshape")
    key_laid_out, value_laid_out = _laid_out(turned_key.outputs[0], _BY_HEADS), _laid_out(value, _BY_HEADS)
    if query_end is None or key_laid_out is None or value_laid_out is None:
        return None
    key_end, value_end = key_laid_out.producer(), value_laid_out.producer()
    heads = turned_query.attributes.get_int("num_heads", 0), turned_key.attributes.get_int("num_heads", 0)
    widths = weight(split.inputs[1])
    if key_end is None or value_end is None or widths is None or 0 in heads:
        return None
    query_width, key_width, value_width = widths.numpy().tolist()
    if key_width != value_width or query_width * heads[1] != key_width * heads[0]:  # heads of different sizes
        return None
    return _Layer(split, (turned_query, turned_key), (query_end, key_end, value_end), heads)


def _reader(value: ir.Value | None, kind: str) -> ir.Node | None:
    """The only reader of a value, if it is of that kind and reads it first."""
    node = only_consumer(value) if value is not None else None
    return node if node is not None and node.op_type == kind and node.inputs[0] is value else None


def _laid_out(value: ir.Value, order: tuple[int, ...]) -> ir.Value | None:
    """What a Reshape and a Transpose in this order make of `value`."""
    split = _reader(value, "Reshape")
    transpose = _reader(split.outputs[0], "Transpose") if split is not None else None
    if transpose is None or tuple(transpose.attributes.get_ints("perm", ())) != order:
        return None
    return transpose.outputs[0]


def _turn_alike(one: ir.Node, other: ir.Node) -> bool:
    settings = [
        (
            *node.inputs[1:],
            node.attributes.get_int("interleaved", 0),
            node.attributes.get_int("rotary_embedding_dim", 0),
        )
        for node in (one, other)
    ]
    return settings[0] == settings[1]


def _rewrite(model: ir.Model, layer: _Layer) -> None:
    (query_heads, kv_heads), turned = layer.heads, layer.turned[0]
    widths = weight(layer.split.inputs[1])
    assert widths is not None
    size = int(widths.numpy()[0]) // query_heads
    # Before the first turn: behind the tables, which may be made after the split, and before the caches.
    with NodeWriter(model.graph, before=layer.turned[0]) as w:
        both = query_heads + kv_heads
        by_token = w.op("Reshape", layer.split.inputs[0], w.integers(0, 0, both + kv_heads, size))
        by_head = w.op("Transpose", by_token, perm=_BY_HEADS)
        turning, values = w.ops("Split", by_head, w.integers(both, kv_heads), names=(None, None), axis=1)
        found = w.op(  # four dimensions need no num_heads
            "RotaryEmbedding",
            turning,
            *turned.inputs[1:],
            interleaved=turned.attributes.get_int("interleaved", 0),
            rotary_embedding_dim=turned.attributes.get_int("rotary_embedding_dim", 0),
        )
        queries, keys = w.ops("Split", found, w.integers(query_heads, kv_heads), names=(None, None), axis=1)
        folded = w.op("Reshape", queries, w.integers(0, kv_heads, -1, size))
    for end, new in zip(layer.ends, (folded, keys, values), strict=True):
        replace_output(end.outputs[0], new)
