"""Attention over a front end's static cache: its `TensorScatter` ([B,C,H*D]) and `Attention` nodes are written anew."""

import math

import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export.passes.graph_tools import Outcome, nodes_of, producer
from forerun_export.passes.static_attention import AttentionLayer, NewEntries, write

_ATTENTION_INPUTS_UNUSED = {
    3: "an attention mask",
    4: "a concatenated key cache",
    5: "a concatenated value cache",
}


def apply(model: ir.Model) -> Outcome:
    """Rewrite every attention layer. Raises ExportError where one cannot be expressed."""
    attentions = nodes_of(model, "Attention")
    if not attentions:
        return Outcome(False, "the graph has no Attention node")
    write(model, [_read_layer(node, number) for number, node in enumerate(attentions)])
    return Outcome(True)


def _read_layer(node: ir.Node, number: int) -> AttentionLayer:
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
    return _layer(node, (keys, values), number)


def _check_scatter(scatter: ir.Node, number: int) -> None:
    if scatter.attributes.get_string("mode", "linear") != "linear":
        raise _refusal(number, "its cache is circular (a sliding window)")
    if scatter.attributes.get_int("axis", -2) not in (1, -2):
        raise _refusal(number, "its cache is not laid out as [B,C,H*D]")
    cache = scatter.inputs[0]
    if cache is None or not cache.is_graph_input() or cache.shape is None or len(cache.shape) != 3:
        raise _refusal(number, "its cache is not a graph input of shape [B,C,H*D]")


def _layer(node: ir.Node, scatters: tuple[ir.Node, ir.Node], number: int) -> AttentionLayer:
    query_heads = node.attributes.get_int("q_num_heads", 0)
    kv_heads = node.attributes.get_int("kv_num_heads", 0)
    widths = [int(scatter.inputs[0].shape[2]) for scatter in scatters]  # type: ignore[union-attr, index, arg-type]
    if kv_heads == 0 or query_heads % kv_heads or widths[0] % kv_heads or widths[0] != widths[1]:
        raise _refusal(number, f"{query_heads} query heads, {kv_heads} KV heads and caches {widths} wide do not fit")
    head_size = widths[0] // kv_heads
    query = node.inputs[0]
    assert query is not None
    return AttentionLayer(
        before=node,
        query=query,
        keys=_entries(scatters[0]),
        values=_entries(scatters[1]),
        output=node.outputs[0],
        heads_first=False,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        scale=node.attributes.get_float("scale", 1 / math.sqrt(head_size)),
        softcap=node.attributes.get_float("softcap", 0.0),
    )


def _entries(scatter: ir.Node) -> NewEntries:
    cache, new = scatter.inputs[:2]
    assert cache is not None
    assert new is not None
    return NewEntries(new, cache, scatter.outputs[0])


def _refusal(number: int, why: str) -> ExportError:
    return ExportError(f"attention layer {number} cannot be exported: {why}; choose a model without it")
