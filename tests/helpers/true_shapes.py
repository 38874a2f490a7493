"""Graphs run with odd sizes, to hold every shape that they declare against what onnxruntime makes."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime

from forerun.backends.ort import session_options

Sizes = Mapping[str, int]
# No two alike, nor alike after small factors: B rows, S tokens, R logit rows, C slots, F features, K drafted, E edits.
ODD: Sizes = {"B": 2, "S": 5, "R": 3, "C": 67, "F": 11, "K": 7, "E": 13}
SINGLE: Sizes = {**ODD, "B": 1, "S": 1, "R": 1, "K": 1}


def assert_shapes_are_true(graph: Path, *, weights_folder: Path | None = None) -> None:
    """Checker and strict inference pass by path, and what every node makes has the declared type and shape."""
    _check_by_path(graph, weights_folder)
    for sizes in (ODD, SINGLE):
        declared, made = _run(graph, weights_folder or graph.parent, sizes)
        wrong = {
            name: (made[name].shape, declared[name].shape)
            for name in made
            if not _is(made[name], declared[name], sizes)
        }
        assert not wrong, f"{graph}: {len(wrong)} of {len(made)} values are not as declared: {list(wrong.items())[:3]}"


def _check_by_path(graph: Path, weights_folder: Path | None) -> None:
    """A graph that reads the weights of another is checked beside these."""
    beside = graph if weights_folder is None else weights_folder / f"checked.{graph.name}"
    inferred = beside.with_suffix(".inferred")
    try:
        if beside != graph:
            shutil.copy(graph, beside)
        onnx.checker.check_model(beside, full_check=True)
        onnx.shape_inference.infer_shapes_path(beside, inferred, check_type=True, strict_mode=True, data_prop=True)
    finally:
        inferred.unlink(missing_ok=True)
        if beside != graph:
            beside.unlink(missing_ok=True)


def _run(
    graph: Path, weights_folder: Path, sizes: Sizes
) -> tuple[Mapping[str, ir.Value], Mapping[str, npt.NDArray[Any]]]:
    """What the outputs of all nodes are declared to be, and what they are in a call of these sizes."""
    model = ir.load(graph)
    declared = {str(value.name): value for node in model.graph for value in node.outputs}
    watched = onnx.load(graph, load_external_data=False)
    del watched.graph.value_info[:], watched.graph.output[:]
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in declared)
    options = session_options(weights_folder=weights_folder)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {str(value.name): _feed(value, sizes) for value in model.graph.inputs}
    return declared, dict(zip(declared, session.run(list(declared), feeds), strict=True))


def _feed(value: ir.Value, sizes: Sizes) -> npt.NDArray[Any]:
    """Ones where numbers are indices: no size is below 1, and none is left out of a call."""
    assert value.shape is not None
    assert value.dtype is not None
    shape = [size if isinstance(size, int) else size.evaluate(sizes) for size in value.shape]
    if value.dtype is ir.DataType.FLOAT:
        return np.random.default_rng(1).random(shape, np.float32)
    return np.zeros(shape, value.dtype.numpy())


def _is(array: npt.NDArray[Any], value: ir.Value, sizes: Sizes) -> bool:
    """A size that has another name, or none, may be anything."""
    if value.shape is None or value.dtype is None or len(value.shape) != array.ndim:
        return False
    expected = [
        size
        if isinstance(size, int)
        else size.evaluate(sizes)
        if size.free_symbols() <= sizes.keys() and size.value
        else None
        for size in value.shape
    ]
    same_type = array.dtype == value.dtype.numpy()
    return same_type and all(size in (None, found) for size, found in zip(expected, array.shape, strict=True))
