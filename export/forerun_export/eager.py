"""The source checkpoint run eagerly in PyTorch by transformers: what built graphs are compared with.

transformers reads the checkpoint and runs it with code of its own, so that a mistake of the front end, of a pass or
of a kernel shows as a difference.
"""

import contextlib
import functools
import gc
import inspect
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from forerun.errors import ExportError
from forerun_export.progress import Report, silent
from forerun_export.reference import Doubles, Prompt, Reference
from forerun_export.sources import Source


def eager_references(
    source: Source,
    prompts: Sequence[Prompt],
    *,
    variants: Sequence[tuple[int, ...]] = ((),),
    report: Report = silent,
) -> Mapping[tuple[int, ...], Reference]:
    """The reference of the checkpoint with each tuple of layers in `variants` left out.

    The model is in memory once, in float32: for float64, each module's weights are doubled while it runs.
    Raises ExportError if transformers cannot load or run the checkpoint.
    """
    with quiet():
        report("Loading the checkpoint in PyTorch")
        model = load_eager(source)
        prompts = [_placed(model, prompt) for prompt in prompts]
        single = {variant: _run(model, prompts, variant) for variant in variants}
        report("Running it in float64")
        double_while_it_runs(model)
        with EverythingDouble():
            double = {variant: _run(model, prompts, variant) for variant in variants}
    name = reference_name()
    del model
    gc.collect()
    return {
        variant: Reference(name, tuple(prompts), double[variant], _differences(single[variant], double[variant]))
        for variant in variants
    }


class EverythingDouble(TorchFunctionMode):
    """Computes in float64 where a model asks for float32 by name (norms, softmax, rotary angles)."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        doubled = {key: _double(value) for key, value in (kwargs or {}).items()}
        return function(*(_double(value) for value in args), **doubled)


def double_while_it_runs(model: Any) -> None:
    """Let every module run with float64 copies of its own weights and buffers, which are dropped behind it."""

    def before(module: Any, _: Any) -> None:
        module.forerun_single = [(tensor, tensor.data) for tensor in own(module)]
        for tensor, single in module.forerun_single:
            tensor.data = single.double()

    def behind(module: Any, *_: Any) -> None:
        for tensor, single in module.forerun_single:
            tensor.data = single

    def own(module: Any) -> list[Any]:
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    for module in model.modules():
        if own(module):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(behind)


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _differences(single: Sequence[Doubles], double: Sequence[Doubles]) -> tuple[float, ...]:
    return tuple(float(np.abs(a - b).max()) for a, b in zip(single, double, strict=True))


def _run(model: Any, prompts: Sequence[Prompt], left_out: tuple[int, ...]) -> tuple[Doubles, ...]:
    with without_layers(model, left_out), torch.no_grad():
        return tuple(_logits(model, prompt) for prompt in prompts)


def _logits(model: Any, prompt: Prompt) -> Doubles:
    inputs = {"input_ids": torch.tensor([prompt.tokens])}
    if _takes_positions(model):
        inputs["position_ids"] = torch.arange(len(prompt.tokens))[None] + prompt.first_position
    logits: Doubles = model(**inputs, use_cache=False).logits[0].double().numpy()
    return logits


def _takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _placed(model: Any, prompt: Prompt) -> Prompt:
    """The prompt, from position 0 where the model lets nobody choose positions."""
    return prompt if _takes_positions(model) else replace(prompt, first_position=0)


@contextlib.contextmanager
def without_layers(model: Any, left_out: Sequence[int]) -> Iterator[None]:
    """Run the model without these layers, numbered from 0, while the context lasts."""
    decoder, name = _layer_list(model)
    layers = getattr(decoder, name)
    setattr(decoder, name, torch.nn.ModuleList(layer for n, layer in enumerate(layers) if n not in left_out))
    try:
        yield
    finally:
        setattr(decoder, name, layers)


def _layer_list(model: Any) -> tuple[Any, str]:
    """The module that holds the list of layers, and what it calls it: architectures differ in both."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == model.config.num_hidden_layers:
                return module, name
    raise ExportError(f"{model.config.model_type} keeps its layers in no list; leave none of them out")


def load_eager(source: Source) -> Any:
    """The checkpoint as a transformers model in float32, for evaluation. Raises ExportError if it cannot be loaded."""
    import transformers

    _refuse_graph(source)
    try:
        if source.kind == "gguf":
            return _load_gguf(source)
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        if missing := sorted(loading["missing_keys"]):  # transformers would draw them at random
            raise ExportError(f"{source.text} lacks {len(missing)} weights ({missing[0]}, ..); fetch it again")
        return model.eval()
    except ExportError:
        raise
    except MemoryError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ExportError(
            f"transformers cannot load {source.text}: {reason[:300]}; choose a checkpoint that it knows"
        ) from error


def eager_config(source: Source) -> Any:
    """The checkpoint's configuration as transformers has it."""
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    _refuse_graph(source)
    if source.kind == "folder":
        return AutoConfig.from_pretrained(source.path, local_files_only=True)
    numbers = load_gguf_checkpoint(str(source.path))["config"]
    return AutoConfig.for_model(numbers.pop("model_type"), **numbers)


def _refuse_graph(source: Source) -> None:
    if source.kind == "onnx":
        raise ExportError(f"{source.text} holds an exported graph and no checkpoint; give the checkpoint for this")


def _load_gguf(source: Source) -> Any:
    """As `from_pretrained(gguf_file=..)` does it, which however insists on the accelerate package."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.modeling_utils import no_init_weights

    with _one_reader():
        config = eager_config(source)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        tensors = load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=model)["tensors"]
    missing, _ = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    if lacking := [name for name in missing if name not in tied]:
        raise ExportError(f"{source.text} lacks {len(lacking)} weights ({lacking[0]}, ..); fetch it again")
    return model.float().eval()


@contextlib.contextmanager
def _one_reader() -> Iterator[None]:
    """Let both reads share one GGUFReader, which takes seconds to go through a vocabulary."""
    original = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(original)
    try:
        yield
    finally:
        gguf.GGUFReader = original


def reference_name() -> str:
    """What makes references."""
    import transformers

    return f"transformers {transformers.__version__}, eager, float64"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No bars and no notices of transformers on the terminal."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
