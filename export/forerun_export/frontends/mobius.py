"""Front end mobius: the mobius-onnx package builds the graph from a GGUF file or a Hugging Face folder."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import clear_metadata_and_docstring

from forerun.errors import ExportError
from forerun.manifest import Architecture
from forerun_export.frontends.graph import CannotExpressError, FrontendGraph
from forerun_export.progress import Report, silent
from forerun_export.sources import Source

# Standard operators only: no fusions into a vendor's operators.
_PROVIDER = "onnx-standard"


def build(source: Source, *, context: int, report: Report = silent) -> FrontendGraph:
    """Build the graph with a static cache; weights float32, made lazily where mobius transposes them.

    Raises CannotExpressError if mobius does not know the architecture, cannot give it a static cache or misses weights
    (its idea of the architecture may differ), ExportError if `context` is longer than the model's.
    """
    with _forwarded_bars(report), _explicit_rotary():
        package = _build_package(source, context)
    if list(package) != ["model"]:
        raise CannotExpressError(
            f"{source.text} has several parts ({', '.join(package)}); forerun exports text decoders only"
        )
    model: ir.Model = package["model"]
    clear_metadata_and_docstring.ClearMetadataAndDocStringPass()(model)
    missing = [name for name, value in model.graph.initializers.items() if value.const_value is None]
    if missing:
        raise CannotExpressError(
            f"{source.text} lacks {len(missing)} weights ({missing[0]}, ..); fetch the checkpoint again"
        )
    window = package.config.sliding_window
    if window is not None and window < context:  # mobius would leave it out, with a warning
        raise CannotExpressError(
            f"{source.text} has a sliding window of {window} tokens, which mobius leaves out; "
            f"use the front end optimum, or set the context to {window} or less"
        )
    architecture = _architecture(package.config, model, _model_type(source))
    if architecture.max_positions == 0:  # positions without a limit (ALiBi), which mobius has no static cache for
        raise CannotExpressError(f"mobius finds no number of positions in {source.text}; use the front end optimum")
    if context > architecture.max_positions:
        raise ExportError(
            f"context {context} is longer than the {architecture.max_positions} positions of {source.text}; lower it"
        )
    return FrontendGraph(model, architecture)


def _build_package(source: Source, context: int) -> Any:
    import mobius

    try:
        if source.kind == "gguf":
            return mobius.build_from_gguf(
                source.path, dtype="f32", execution_provider=_PROVIDER, static_cache=True, max_seq_len=context
            )
        task = mobius.CausalLMTask(static_cache=True, max_seq_len=context)
        return mobius.build(str(source.path), task=task, dtype="f32", execution_provider=_PROVIDER)
    except MemoryError:
        raise
    except Exception as error:  # mobius raises KeyError, ValueError, NotImplementedError, AssertionError, ..
        reason = (str(error).splitlines() or [type(error).__name__])[0].strip("'\"")
        raise CannotExpressError(
            f"mobius cannot build {source.text} (model type {_model_type(source)}): {reason[:300]}; "
            "choose a decoder-only text model that it knows"
        ) from error


def _model_type(source: Source) -> str:
    config = source.config()
    return str(config.get("general.architecture" if source.kind == "gguf" else "model_type", "unknown"))


def _architecture(config: Any, model: ir.Model, model_type: str) -> Architecture:
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    assert logits.shape is not None
    return Architecture(
        model_type=model_type,
        layers=int(config.num_hidden_layers),
        query_heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_size=int(config.head_dim),
        hidden_size=int(config.hidden_size),
        vocabulary_size=int(logits.shape[-1]),  # type: ignore[arg-type]
        max_positions=int(config.max_position_embeddings),
    )


@contextlib.contextmanager
def _explicit_rotary() -> Iterator[None]:
    """Give configurations the `rope_parameters` by which mobius tells models with rotary positions.

    mobius 0.1.0 takes a configuration of transformers 4 with the default rope_theta of 10000 for one without
    positions, and leaves the rotation out.
    """
    from transformers import AutoConfig

    original = AutoConfig.from_pretrained

    def with_rope_parameters(*args: Any, **options: Any) -> Any:
        config = original(*args, **options)
        theta = getattr(config, "rope_theta", None)
        if theta and not getattr(config, "rope_scaling", None) and not hasattr(config, "rope_parameters"):
            config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        return config

    AutoConfig.from_pretrained = with_rope_parameters
    try:
        yield
    finally:
        AutoConfig.from_pretrained = original


@contextlib.contextmanager
def _forwarded_bars(report: Report) -> Iterator[None]:
    """Send what mobius shows as tqdm bars to `report`, and nothing to the terminal."""
    import tqdm  # type: ignore[import-untyped]

    class Forwarded(tqdm.tqdm):  # type: ignore[misc]
        def display(self, *_: object, **__: object) -> None:
            report(str(self.desc or "Building the graph").rstrip(": "), int(self.n), int(self.total or 1))

    original = tqdm.tqdm
    tqdm.tqdm = Forwarded
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tqdm.tqdm = original
