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


def assert_shapes_are_true(graph: Path, *, weights_folder: Path | None = None, may_be_open: bool = False) -> None:
    """Checker and strict inference pass by path, and what every node makes has the declared type and shape.

    `may_be_open` where sizes depend on data. Sizes have no other names than those of ODD.
    """
    _check_by_path(graph, weights_folder)
    for sizes in (ODD, SINGLE):
        declared, made = _run(graph, weights_folder or graph.parent, sizes)
        wrong = [
            f"{name} is {made[name].dtype} {list(made[name].shape)}, declared {value.dtype} {value.shape}"
            for name, value in declared.items()
            if not _fits(made[name], value, sizes, may_be_open)
        ]
        assert not wrong, f"{graph}: {len(wrong)} of {len(made)} values are not as declared: {'; '.join(wrong[:3])}"


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
    """Some numbers, and the first place for whatever is an index."""
    assert value.shape is not None
    assert value.dtype is not None
    shape = [_size(size, sizes) for size in value.shape]
    if value.dtype is ir.DataType.FLOAT:
        return np.random.default_rng(1).random(shape, np.float32)
    return np.zeros(shape, value.dtype.numpy())


def _fits(array: npt.NDArray[Any], value: ir.Value, sizes: Sizes, may_be_open: bool) -> bool:
    if value.shape is None or value.dtype is None or len(value.shape) != array.ndim:
        return False
    expected = [None if may_be_open and _is_open(size) else _size(size, sizes) for size in value.shape]
    same_shape = all(size in (None, found) for size, found in zip(expected, array.shape, strict=True))
    return same_shape and array.dtype == value.dtype.numpy()


def _is_open(size: int | ir.SymbolicDim) -> bool:
    return isinstance(size, ir.SymbolicDim) and size.value is None


def _size(size: int | ir.SymbolicDim, sizes: Sizes) -> int:
    """A declared size in a call; -1 for one that has no name, or an unknown one."""
    if isinstance(size, int):
        return size
    known = not _is_open(size) and size.free_symbols() <= sizes.keys()
    return int(size.evaluate(sizes) or 0) if known else -1
