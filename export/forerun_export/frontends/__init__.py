"""Front ends build a checkpoint's graph; the passes then bring it to the decoder contract."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import onnx_ir as ir

from forerun.errors import ExportError
from forerun.manifest import Architecture
from forerun_export.frontends.graph import CannotExpressError, FrontendGraph
from forerun_export.passes import (
    cached_attention,
    decoder_inputs,
    drop_layers,
    fixed_sizes,
    flat_rows,
    fuse_projections,
    grown_attention,
    heads_together,
    logit_rows,
    norm_operator,
    position_tables,
    rotary_operator,
    rotary_tables,
    tidy,
    tied_head,
)
from forerun_export.passes.graph_tools import Outcome
from forerun_export.progress import Report, silent
from forerun_export.sources import Source

logger = logging.getLogger(__name__)

FrontendName = Literal["auto", "mobius", "optimum"]


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
    frontend: FrontendName = "auto",
    report: Report = silent,
) -> Decoder:
    """Build the decoder graph of a checkpoint for up to `context` tokens, float32.

    `auto` is mobius, whose graphs are no slower and take less time to build, unless it cannot express the model.
    Raises ExportError if the front end does not know the architecture, if the context is longer than the model's,
    or if the graph cannot be brought to the decoder contract.
    """
    graph, name = _build(source, context, frontend, report)
    caches = sum(str(value.name).startswith("k_cache.") for value in graph.model.graph.inputs)
    if caches != graph.architecture.layers:
        raise ExportError(
            f"{source.text} has {graph.architecture.layers} layers, {caches} of them with a plain cache; "
            "choose a model whose layers all have one"
        )
    decoder = Decoder(graph.model, graph.architecture, name)
    return decoder.without_layers(layers_left_out) if layers_left_out else decoder


def _build(source: Source, context: int, frontend: FrontendName, report: Report) -> tuple[FrontendGraph, str]:
    """The graph in contract form, and the name of the front end that made it."""
    if frontend == "optimum" or source.kind == "onnx":
        return _by_optimum(source, context, report), "optimum"
    try:
        return _by_mobius(source, context, report), "mobius"
    except CannotExpressError as error:
        if frontend == "mobius":
            raise
        report(f"using optimum, as {error}")
        return _by_optimum_instead(source, context, report, error), "optimum"


def _by_mobius(source: Source, context: int, report: Report) -> FrontendGraph:
    from forerun_export.frontends import mobius

    graph = mobius.build(source, context=context, report=report)
    try:
        run_passes(graph.model, built_passes(context))
    except ExportError as error:
        raise CannotExpressError(str(error)) from error
    return graph


def _by_optimum(source: Source, context: int, report: Report) -> FrontendGraph:
    from forerun_export.frontends import optimum

    graph = optimum.build(source, context=context, report=report)
    report("rewriting the traced graph")
    run_passes(graph.model, traced_passes(context, graph.softcap))
    return graph


def _by_optimum_instead(source: Source, context: int, report: Report, why: CannotExpressError) -> FrontendGraph:
    try:
        return _by_optimum(source, context, report)
    except ExportError as error:
        raise ExportError(f"by mobius: {why}; by optimum: {error}") from error


Pass = tuple[Callable[[ir.Model], Outcome], str, bool]
"""What to apply, its name, and whether the contract needs it to fire."""


def run_passes(model: ir.Model, passes: Sequence[Pass]) -> None:
    """Bring a graph to the contract. Raises ExportError if a pass that the contract needs does not fire."""
    for apply, name, needed in passes:
        outcome = apply(model)
        if needed and not outcome.modified:
            raise ExportError(f"the graph does not fit the decoder contract: {outcome.reason}; use another model")
        logger.info("%s: %s", name, "done" if outcome.modified else f"nothing done, {outcome.reason}")


def built_passes(context: int) -> list[Pass]:
    """From a builder's graph, with a static cache and the operators of opset 24, to the contract."""
    return [
        (fuse_projections.apply, "fuse_projections", False),
        (cached_attention.apply, "cached_attention", True),
        (heads_together.apply, "heads_together", False),
        (logit_rows.apply, "logit_rows", True),
        (tied_head.apply, "tied_head", False),
        (functools.partial(rotary_tables.apply, context=context), "rotary_tables", False),
        (decoder_inputs.apply, "decoder_inputs", False),
    ]


def traced_passes(context: int, softcap: float | None = None) -> list[Pass]:
    """From a traced graph to one with the operators of a builder's, and on to the contract."""
    return [
        (tidy.apply, "tidy", True),
        (functools.partial(fixed_sizes.apply, context=context), "fixed_sizes", True),
        (flat_rows.apply, "flat_rows", False),
        (functools.partial(grown_attention.apply, context=context, softcap=softcap), "grown_attention", True),
        (functools.partial(position_tables.apply, context=context), "position_tables", False),
        (rotary_operator.apply, "rotary_operator", False),
        (norm_operator.apply, "norm_operator", False),
        (fuse_projections.apply, "fuse_projections", False),
        (logit_rows.apply, "logit_rows", True),
        (tied_head.apply, "tied_head", False),
        (decoder_inputs.apply, "decoder_inputs", False),
    ]
