"""Graphs built in tests: saved, and broken in one way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from forerun_export.frontends import Decoder
from forerun_export.graph_files import save_graph

Array = npt.NDArray[Any]


def save(decoder: Decoder, folder: Path) -> Path:
    """Write a decoder into `folder` and give the path of its graph."""
    folder.mkdir(parents=True, exist_ok=True)
    save_graph(decoder.model, folder / "model.onnx", folder / "model.onnx.data")
    return folder / "model.onnx"


def with_weight(decoder: Decoder, part_of_name: str, change: Callable[[Array], Array]) -> Decoder:
    """The decoder with the values of one initializer changed."""
    model = decoder.model.clone()
    name = next(name for name in model.graph.initializers if part_of_name in name)
    value = model.graph.initializers[name]
    assert value.const_value is not None
    changed = np.ascontiguousarray(change(value.const_value.numpy().copy()))
    value.const_value = ir.tensor(changed, name=name)
    return Decoder(model, decoder.architecture, decoder.frontend, decoder.layers_left_out)


def kinds(decoder: Decoder) -> list[str]:
    """The operators of a decoder's graph, in order."""
    return [node.op_type for node in decoder.model.graph]
