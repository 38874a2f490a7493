"""A draft made of the target's own graph with some layers left out.

The residual stream bypasses a layer, its caches go, the rest are numbered anew, and every weight keeps the name it
has in the target, so that the draft's external data can point into the target's weight file.
"""

from collections.abc import Sequence

import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export.passes.graph_tools import Outcome, drop_unused, graph_input, replace_output


def apply(model: ir.Model, *, layers: Sequence[int]) -> Outcome:
    """Leave out the given layers (0-based) of a graph in contract form.

    Raises ExportError for layers that are not there, if none would remain, or if the residual stream is not two
    additions a layer.
    """
    if not layers:
        return Outcome(False, "no layers are to be left out")
    count = sum(str(value.name).startswith("k_cache.") for value in model.graph.inputs)
    outside = sorted(layer for layer in set(layers) if not 0 <= layer < count)
    if outside:
        raise ExportError(f"layers {outside} do not exist: the model has layers 0 to {count - 1}; name others")
    if len(set(layers)) == count:
        raise ExportError(f"all {count} layers would be left out; keep at least one")
    stream = residual_stream(model, count)
    for layer in sorted(set(layers)):
        replace_output(stream[2 * layer + 2], stream[2 * layer])
        stream[2 * layer + 2] = stream[2 * layer]
    _renumber_caches(model, [layer for layer in range(count) if layer not in set(layers)])
    drop_unused(model)
    return Outcome(True)


def residual_stream(model: ir.Model, layers: int) -> list[ir.Value]:
    """The residual stream [B,S,hidden]: after the embedding, then after each of the two additions of each layer."""
    stream = [embedded(model)]
    while True:
        additions = [node for node in stream[-1].consumers() if node.op_type == "Add"]
        if not additions:
            break
        stream.append(additions[0].outputs[0])
    if len(stream) != 2 * layers + 1:
        raise ExportError(
            f"this model's layers cannot be told apart: {layers} layers make {len(stream) - 1} residual additions, "
            f"not {2 * layers}; use a draft checkpoint"
        )
    return stream


def embedded(model: ir.Model) -> ir.Value:
    """What the first layer reads: the embedding, scaled or normalised where a model does that first."""
    lookups = [node for node in graph_input(model, "input_ids").consumers() if node.op_type == "Gather"]
    if len(lookups) != 1:
        raise ExportError(
            "the graph has no single embedding, so its layers cannot be told apart; use a draft checkpoint"
        )
    value = lookups[0].outputs[0]
    while len(value.consumers()) == 1:  # an embedding that is scaled or normalised first
        value = value.consumers()[0].outputs[0]
    return value


def _renumber_caches(model: ir.Model, kept: Sequence[int]) -> None:
    for values, suffix in ((model.graph.inputs, ""), (model.graph.outputs, "_out")):
        cache = f"_cache{suffix}."
        names = {f"{kind}{cache}{old}": f"{kind}{cache}{new}" for new, old in enumerate(kept) for kind in "kv"}
        values[:] = [value for value in values if cache not in str(value.name) or value.name in names]
        for value in values:
            value.name = names.get(str(value.name), value.name)
