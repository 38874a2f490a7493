"""Front ends build a checkpoint's graph; the passes then bring it to the decoder contract."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import onnx_ir as ir

from forerun.errors import ExportError
from forerun.manifest import Architecture
from forerun_export.passes import (
    cached_attention,
    decoder_inputs,
    drop_layers,
    fuse_projections,
    logit_rows,
    rotary_tables,
    tied_head,
)
from forerun_export.passes.graph_tools import Outcome
from forerun_export.progress import Report, silent
from forerun_export.sources import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoder:
    """A decoder graph in contract form, with its weights, and the numbers of its architecture."""

    model: ir.Model
    architecture: Architecture
    frontend: str
    layers_left_out: tuple[int, ...] = ()

    def without_layers(self, layers: Sequence[int]) -> "Decoder":
        """The same decoder with some layers (0-based) left out; it shares this one's tensors and their names.

        Raises ExportError if a layer does not exist, if none would remain, or if the model has no plain residual
        stream.
        """
        model = self.model.clone()
        drop_layers.apply(model, layers=layers)
        left_out = tuple(sorted(set(layers)))
        architecture = replace(self.architecture, layers=self.architecture.layers - len(left_out))
        return replace(self, model=model, architecture=architecture, layers_left_out=left_out)


def build_decoder(
    source: Source,
    *,
    context: int,
    layers_left_out: Sequence[int] = (),
    frontend: Literal["auto", "mobius", "optimum"] = "auto",
    report: Report = silent,
) -> Decoder:
    """Build the decoder graph of a checkpoint for up to `context` tokens, float32.

    Raises ExportError if the front end does not know the architecture, if the context is longer than the model's,
    or if the graph cannot be brought to the decoder contract.
    """
    if frontend == "optimum":
        raise ExportError("frontend optimum is not part of this version; use mobius (or auto)")
    from forerun_export.frontends import mobius

    graph = mobius.build(source, context=context, report=report)
    to_contract(graph.model, context=context)
    caches = sum(str(value.name).startswith("k_cache.") for value in graph.model.graph.inputs)
    if caches != graph.architecture.layers:
        raise ExportError(
            f"{source.text} has {graph.architecture.layers} layers, {caches} of them with a plain cache; "
            "choose a model whose layers all have one"
        )
    decoder = Decoder(graph.model, graph.architecture, "mobius")
    return decoder.without_layers(layers_left_out) if layers_left_out else decoder


def to_contract(model: ir.Model, *, context: int) -> None:
    """Run the passes in order. Raises ExportError if one that the contract needs does not fire."""
    passes: list[tuple[Callable[[ir.Model], Outcome], str, bool]] = [
        (fuse_projections.apply, "fuse_projections", False),
        (cached_attention.apply, "cached_attention", True),
        (logit_rows.apply, "logit_rows", True),
        (tied_head.apply, "tied_head", False),
        (functools.partial(rotary_tables.apply, context=context), "rotary_tables", False),
        (decoder_inputs.apply, "decoder_inputs", False),
    ]
    for apply, name, needed in passes:
        outcome = apply(model)
        if needed and not outcome.modified:
            raise ExportError(f"the graph does not fit the decoder contract: {outcome.reason}; use another model")
        logger.info("%s: %s", name, "done" if outcome.modified else f"nothing done, {outcome.reason}")
