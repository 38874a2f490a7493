"""The checkpoint as Optimum runs it: exported to ONNX once, then ORTModelForCausalLM."""

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForCausalLM

from forerun.errors import ForerunError
from forerun_export.bench.cached import built_once
from forerun_export.bench.generating import generate, set_end_tokens
from forerun_export.bench.runs import Output, Task
from forerun_export.eager import load_eager
from forerun_export.sources import resolve
from forerun_export.writer import temporary_sibling

TASK = "text-generation-with-past"
_TOOLS = ("optimum-onnx", "transformers", "torch")


class OptimumSystem:
    """A float32 ONNX model with the caches that grow by a concatenation for each token."""

    def __init__(self, checkpoint: str, *, threads: int, end_tokens: Sequence[int]) -> None:
        folder = exported(checkpoint)
        torch.set_num_threads(threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._model = ORTModelForCausalLM.from_pretrained(folder, session_options=options)
        set_end_tokens(self._model, end_tokens)

    def decode(self, task: Task) -> Output:
        """See `System.decode`."""
        return generate(self._model, task)

    def profile(self) -> None:
        """See `System.profile`."""


def exported(checkpoint: str) -> Path:
    """The folder of the checkpoint's ONNX model, made where it is not there yet. Raises ExportError if that fails."""
    versions = "-".join(importlib.metadata.version(tool) for tool in _TOOLS)
    name = f"optimum-{resolve(checkpoint).sha256()[:16]}-{versions}"
    return built_once(name, __name__, [checkpoint], failure=f"optimum cannot export {checkpoint}")


def export(checkpoint: str, folder: Path) -> None:
    """Write the ONNX model that `optimum-cli export onnx --task text-generation-with-past` writes."""
    from optimum.exporters.onnx import onnx_export_from_model

    with temporary_sibling(folder) as temporary:
        model = load_eager(resolve(checkpoint))
        model.set_attn_implementation("sdpa")
        onnx_export_from_model(model, temporary / "model", task=TASK, do_validation=False)
        (temporary / "model").replace(folder)


if __name__ == "__main__":
    try:
        export(sys.argv[1], Path(sys.argv[2]))
    except ForerunError as error:
        sys.exit(str(error))
