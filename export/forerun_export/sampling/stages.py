"""The stages of sampling: graphs that hand tensors on to each other in device buffers.

    edit -> law or law-filtered -> draw, propose or verify-LAW -> logprobs

Every control works with every law because each is a stage of its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir

from forerun_export import graph_check
from forerun_export.sampling import controls, drawing, filters, verification
from forerun_export.sampling.saving import sampling_model

SAMPLING_GRAPHS: dict[str, Callable[..., Any]] = {
    "edit": controls.edit,
    "law": controls.plain_law,
    "law-filtered": filters.law_filtered,
    "draw": drawing.draw,
    "propose": drawing.propose,
    "verify-residual": verification.verify_residual,
    "verify-block": verification.verify_block,
    "verify-points": verification.verify_points,
    "verify-coupled": verification.verify_coupled,
    "draw-greedy": drawing.draw_greedy,
    "propose-greedy": drawing.propose_greedy,
    "verify-greedy": verification.verify_greedy,
    "logprobs": controls.logprobs,
}


def save_sampling_graphs(folder: Path, vocabulary_size: int) -> dict[str, Path]:
    """Write every stage for a vocabulary of `vocabulary_size` tokens; return its file by name.

    Raises ExportError for one that contradicts itself.
    """
    files = {name: folder / f"{name}.onnx" for name in SAMPLING_GRAPHS}
    for name, graph in SAMPLING_GRAPHS.items():
        model = onnx_ir.to_proto(sampling_model(graph, vocabulary_size))
        graph_check.require(model, files[name])
        onnx.save(model, files[name])
    return files
