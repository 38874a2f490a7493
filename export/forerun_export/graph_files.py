"""Writing graphs: one protobuf beside one weight file, and graphs that share another graph's weight file.

Every graph is written with the true shapes of all its values, and only if it passes `graph_check`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export import graph_check
from forerun_export.passes import true_shapes
from forerun_export.passes.graph_tools import sizes

# Below this size a tensor stays in the graph file: shape constants and scalars, which onnxruntime reads at load.
INLINE_BYTES = 1024
# onnxruntime maps external data straight from the file: page-aligned tensors need no copy.
ALIGNMENT = 4096

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def save_graph(model: ir.Model, graph_path: Path, weights_path: Path, *, progress: Progress | None = None) -> None:
    """Write `model`; tensors of INLINE_BYTES or more go to `weights_path`, which must lie in the graph's folder.

    Tensors are made, written and dropped one at a time. The model's own tensors stay as they were. Raises ExportError,
    before anything is written, for a graph that contradicts itself.
    """
    large = [(name, value) for name, value in model.graph.initializers.items() if _is_large(value)]
    places, end = dict[str, ir.ExternalTensor](), 0
    for name, value in large:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        places[name], end = _place(_tensor(value), name, weights_path.name, start), start + _tensor(value).nbytes
    graph = _checked(model, places, graph_path)
    with open(weights_path, "wb") as file:
        for name, value in large:
            file.write(bytes((places[name].offset or 0) - file.tell()))
            file.write(_bytes(_tensor(value).numpy()).data)
            if progress is not None:
                progress(file.tell(), end)
    onnx.save(graph, graph_path)


def save_sharing_graph(model: ir.Model, graph_path: Path, owner_path: Path) -> None:
    """Write only the graph of `model`, each large tensor pointing at the same-named one of the graph `owner_path`.

    The location is written as the owner has it; whoever loads the graph gives onnxruntime the owner's folder
    (`session.model_external_initializers_file_folder_path`). Raises ExportError if a tensor's bytes are not there,
    or if the graph contradicts itself.
    """
    owned = external_tensors(owner_path)
    places: dict[str, ir.ExternalTensor] = {}
    for name, value in model.graph.initializers.items():
        if not _is_large(value):
            continue
        place = owned.get(name)
        if place is None or not _same(place, _tensor(value)):
            raise ExportError(f"weight {name} of {graph_path.name} is not in {owner_path}; export both together")
        places[name] = place
    onnx.save(_checked(model, places, graph_path), graph_path)


def load_graph(graph_path: Path, weights_folder: Path) -> ir.Model:
    """A saved graph whose large tensors are mapped from the weight file in `weights_folder`."""
    model = ir.load(graph_path)
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value.base_dir = weights_folder
    return model


def external_tensors(graph_path: Path) -> dict[str, ir.ExternalTensor]:
    """The tensors of a saved graph that lie in its weight file, by name."""
    graph = ir.load(graph_path).graph
    tensors = {name: value.const_value for name, value in graph.initializers.items()}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, ir.ExternalTensor)}


def _same(place: ir.ExternalTensor, tensor: ir.TensorProtocol) -> bool:
    if place.dtype != tensor.dtype or place.shape != tensor.shape:
        return False
    if isinstance(tensor, ir.ExternalTensor) and Path(tensor.path) == Path(place.path):
        return tensor.offset == place.offset
    with open(place.path, "rb") as file:
        file.seek(place.offset or 0)
        written = np.fromfile(file, np.uint8, place.nbytes)
    return np.array_equal(written, _bytes(tensor.numpy()))


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _is_large(value: ir.Value) -> bool:
    return _tensor(value).nbytes >= INLINE_BYTES


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    if value.const_value is None:
        raise ExportError(f"the checkpoint has no weight for {value.name}; it is incomplete, fetch it again")
    return value.const_value


def _place(tensor: ir.TensorProtocol, name: str, location: str, offset: int) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        location,
        offset,
        tensor.nbytes,
        tensor.dtype,
        shape=ir.Shape(sizes(tensor)),
        name=name,
        base_dir="",
    )


def _checked(model: ir.Model, places: dict[str, ir.ExternalTensor], graph_path: Path) -> onnx.ModelProto:
    """What to write to `graph_path`: true shapes everywhere, weights at their places."""
    copy = model.clone()
    for name, place in places.items():
        copy.graph.initializers[name].const_value = place
    true_shapes.apply(copy)
    graph = ir.to_proto(copy)
    graph_check.require(graph, graph_path)
    return graph
