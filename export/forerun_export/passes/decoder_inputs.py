"""Names, order and symbolic shapes of the decoder contract, and the check that the graph meets it.

Inputs input_ids, position_ids [B,S]; write_indices [B]; tree_mask [B,S,S];
logit_rows [B,R]; k_cache.i, v_cache.i [B,H,C,D]; outputs logits [B,R,V], k_cache_out.i, v_cache_out.i.
"""

import onnx_ir as ir

from forerun.contract import TOKEN_INPUTS
from forerun.errors import ExportError
from forerun_export.passes.graph_tools import Outcome, nodes_of


def apply(model: ir.Model) -> Outcome:
    """Rename and order what the other passes left. Raises ExportError if the contract cannot be met."""
    before = _names(model)
    inputs = {str(value.name): value for value in model.graph.inputs}
    missing = [name for name in TOKEN_INPUTS if name not in inputs]
    if missing:
        raise ExportError(f"the front end's graph lacks {', '.join(missing)}; use another front end")
    for name, (kind, shape) in TOKEN_INPUTS.items():
        inputs[name].type, inputs[name].shape = ir.TensorType(ir.DataType(kind.onnx_type)), ir.Shape(shape)
    caches = _rename_caches(model)
    _refuse_leftovers(model, set(TOKEN_INPUTS) | {str(cache.name) for cache, _ in caches})
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    model.graph.inputs[:] = [inputs[name] for name in TOKEN_INPUTS] + [cache for cache, _ in caches]
    model.graph.outputs[:] = [logits] + [written for _, written in caches]
    return Outcome(_names(model) != before, "the names and their order were right already")


def _names(model: ir.Model) -> list[str | None]:
    return [value.name for value in (*model.graph.inputs, *model.graph.outputs)]


def _rename_caches(model: ir.Model) -> list[tuple[ir.Value, ir.Value]]:
    """(cache, written cache) of each layer, keys before values, in graph order, renamed."""
    scatters = [node for node in nodes_of(model, "TensorScatter") if node.inputs[0].is_graph_input()]  # type: ignore[union-attr]
    if not scatters or len(scatters) % 2:
        raise ExportError("the front end's graph has no pairs of static key and value caches; use another front end")
    pairs = []
    for number, node in enumerate(scatters):
        kind, layer = ("k", "v")[number % 2], number // 2
        cache, written = node.inputs[0], node.outputs[0]
        assert cache is not None
        cache.name, written.name = f"{kind}_cache.{layer}", f"{kind}_cache_out.{layer}"
        pairs.append((cache, written))
    return pairs


def _refuse_leftovers(model: ir.Model, known: set[str]) -> None:
    extra = [value for value in model.graph.inputs if value.name not in known]
    used = [str(value.name) for value in extra if value.uses()]
    if used:
        names = ", ".join(used)
        raise ExportError(f"the front end's graph also needs {names}, which no decoder gives; use another front end")
