"""Front end optimum: the optimum-onnx package traces a checkpoint with its growing caches, or has done so already.

A folder that Optimum exported (model.onnx, config.json, the tokenizer) is read as it is, without PyTorch.
"""

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime

from forerun.backends.ort import THREAD_POOL
from forerun.errors import ExportError
from forerun.manifest import Architecture
from forerun_export.frontends.graph import CannotExpressError, FrontendGraph
from forerun_export.progress import Report, silent
from forerun_export.sources import GRAPH_NAME, Source

TASK = "text-generation-with-past"
# The names that configurations give to one number; the first that is there counts.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")


def build(source: Source, *, context: int, report: Report = silent) -> FrontendGraph:
    """The traced graph of a checkpoint, or of a folder that was exported before; float32.

    Raises CannotExpressError if Optimum cannot export it, ExportError if it is damaged or `context` is longer than
    the model's.
    """
    model, config = _read(source, report) if source.kind == "onnx" else _export(source, report)
    architecture = _architecture(config, model, context)
    if context > architecture.max_positions:
        raise ExportError(
            f"context {context} is longer than the {architecture.max_positions} positions of {source.text}; lower it"
        )
    return FrontendGraph(model, architecture, config.get("attn_logit_softcapping"))


def _read(source: Source, report: Report) -> tuple[ir.Model, Mapping[str, Any]]:
    report("reading the graph")
    return load(source.path / GRAPH_NAME), source.config()


def load(path: Path) -> ir.Model:
    """A graph file with its weights. Raises ExportError if it or its weight file is missing or damaged."""
    try:
        model = ir.load(path)
        for value in model.graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value.numpy()  # maps it: the file may go, the weights stay
    except Exception as error:  # protobuf, the file system and the loader raise what they like
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ExportError(f"{path} cannot be read: {reason[:300]}; export the model again") from error
    return model


def _export(source: Source, report: Report) -> tuple[ir.Model, Mapping[str, Any]]:
    """Trace the checkpoint. Attention is eager: another implementation drops the cap of scores (Gemma 2)."""
    try:
        from optimum.exporters.onnx import onnx_export_from_model
    except ModuleNotFoundError as error:
        raise CannotExpressError(
            f"the front end optimum needs the package {error.name}; install it with: pip install optimum-onnx"
        ) from error
    from forerun_export.eager import load_eager

    report("loading the checkpoint in PyTorch")
    with quiet():
        model = load_eager(source)
    report("tracing it with Optimum")
    with tempfile.TemporaryDirectory(prefix="forerun-optimum-") as folder, quiet(), on_shared_pool():
        try:
            onnx_export_from_model(model, Path(folder), task=TASK, do_validation=False)
        except MemoryError:
            raise
        except Exception as error:  # the tracer and the model's own code raise what they like
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CannotExpressError(
                f"Optimum cannot export {source.text} (model type {model.config.model_type}): {reason[:300]}; "
                "choose a decoder-only text model that it knows"
            ) from error
        return load(Path(folder) / GRAPH_NAME), model.config.to_dict()


def _architecture(config: Mapping[str, Any], model: ir.Model, context: int) -> Architecture:
    """The numbers that configuration and graph tell; without positions of its own a model has those of the context."""
    numbers = {**config, **config.get("text_config", {})}
    cache = next((value for value in model.graph.inputs if str(value.name).endswith(".key")), None)
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    if cache is None or cache.shape is None or logits is None:
        names = ", ".join(str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)[:6])
        raise ExportError(
            f"the graph has no caches past_key_values.N.key or no logits (it has {names}, ..); "
            f"export the model with --task {TASK}"
        )
    return Architecture(
        model_type=str(numbers.get("model_type", "unknown")),
        layers=_number(numbers, _LAYERS),
        query_heads=_number(numbers, _HEADS),
        kv_heads=int(cache.shape[1]),  # type: ignore[arg-type]
        head_size=int(cache.shape[3]),  # type: ignore[arg-type]
        hidden_size=_number(numbers, _HIDDEN),
        vocabulary_size=_vocabulary_size(logits, numbers),
        max_positions=max_positions(config, default=context),
    )


def max_positions(config: Mapping[str, Any], *, default: int) -> int:
    """The positions that a configuration allows; `default` if it names no limit."""
    return _number({**config, **config.get("text_config", {})}, _POSITIONS, default=default)


def _number(config: Mapping[str, Any], names: tuple[str, ...], *, default: int | None = None) -> int:
    found = [config[name] for name in names if isinstance(config.get(name), int)]
    if not found and default is None:
        raise ExportError(f"config.json tells none of {', '.join(names)}; fetch the checkpoint again")
    return int(found[0] if found else default)  # type: ignore[arg-type]


def _vocabulary_size(logits: ir.Value, config: Mapping[str, Any]) -> int:
    size = logits.shape[-1] if logits.shape is not None else None
    return size if isinstance(size, int) else _number(config, ("vocab_size",))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing of what tracing says goes to the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        silence = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stderr(silence), contextlib.redirect_stdout(silence):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def on_shared_pool() -> Iterator[None]:
    """Let Optimum's own onnxruntime session use the process-wide thread pool: beside it there can be no other."""
    original = onnxruntime.SessionOptions

    def shared() -> onnxruntime.SessionOptions:
        THREAD_POOL.share(None)
        options = original()
        options.use_per_session_threads = False
        return options

    onnxruntime.SessionOptions = shared
    try:
        yield
    finally:
        onnxruntime.SessionOptions = original
