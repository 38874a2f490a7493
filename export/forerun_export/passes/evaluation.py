"""A piece of a graph run by itself, to see what it computes: how recognition proves what it supposes.

Weights are fed like inputs, so that nothing is written and nothing is copied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime

from forerun.backends.ort import session_options
from forerun.errors import ExportError

Array = npt.NDArray[Any]
# Smaller constants stay in the piece: sizes and axes that onnxruntime wants to know when it loads.
_INLINE_NUMBERS = 64


class Piece:
    """What leads from `given` values, and from graph inputs, to `outputs`."""

    def __init__(self, model: ir.Model, outputs: Sequence[ir.Value], given: Sequence[ir.Value] = ()) -> None:
        self._model = model
        self._outputs = list(dict.fromkeys(outputs))
        self._given = set(given)
        self.nodes, leaves = self._closure()
        """The nodes of the piece, in graph order."""
        self._weights = {value for value in leaves if value.const_value is not None}
        self.inputs = frozenset(leaves - self._weights)
        """The values that must be fed: given ones, and graph inputs."""
        self._session: onnxruntime.InferenceSession | None = None

    def _closure(self) -> tuple[list[ir.Node], set[ir.Value]]:
        needed: set[ir.Node] = set()
        leaves: set[ir.Value] = set()
        waiting = list(self._outputs)
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if value in self._given or node is None:
                leaves.add(value)
            elif node not in needed:
                needed.add(node)
                waiting += [source for source in node.inputs if source is not None]
        return [node for node in self._model.graph if node in needed], leaves

    def run(self, feeds: Mapping[ir.Value, Array]) -> list[Array]:
        """The arrays of `outputs`. Raises ExportError if onnxruntime cannot run the piece."""
        try:
            session = self._session or self._load(feeds)
            arrays = {str(value.name): feeds[value] for value in self.inputs}
            arrays |= {str(value.name): _array(value) for value in self._weights if not _is_small(value)}
            return [np.asarray(array) for array in session.run([str(value.name) for value in self._outputs], arrays)]
        except ExportError:
            raise
        except Exception as error:  # onnxruntime's exceptions share no narrower class
            place = self._outputs[0].name
            reason = str(error).splitlines()[0][:300]
            raise ExportError(f"the graph cannot be run up to {place}: {reason}; export it again") from error

    def _load(self, feeds: Mapping[ir.Value, Array]) -> onnxruntime.InferenceSession:
        inputs = [_declared(value, feeds[value].dtype) for value in self.inputs]
        inputs += [_declared(value, _array(value).dtype) for value in self._weights if not _is_small(value)]
        small = [onnx.numpy_helper.from_array(_array(v), v.name) for v in self._weights if _is_small(v)]
        outputs = [onnx.ValueInfoProto(name=value.name) for value in self._outputs]
        nodes = [ir.to_proto(node) for node in self.nodes]
        graph = onnx.helper.make_graph(nodes, "piece", inputs, outputs, small)
        opset = [onnx.helper.make_opsetid(domain, version) for domain, version in self._model.opset_imports.items()]
        proto = onnx.helper.make_model(graph, opset_imports=opset, ir_version=10)
        options = session_options()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return self._session


def constant_array(model: ir.Model, value: ir.Value) -> Array | None:
    """What `value` always is, if it depends on no input; else None."""
    if value.const_value is not None and value.producer() is None:
        return _array(value)
    piece = Piece(model, [value])
    return None if piece.inputs else piece.run({})[0]


def _array(value: ir.Value) -> Array:
    assert value.const_value is not None
    return value.const_value.numpy()


def _is_small(value: ir.Value) -> bool:
    assert value.const_value is not None
    return value.const_value.size <= _INLINE_NUMBERS


def _declared(value: ir.Value, dtype: np.dtype[Any]) -> onnx.ValueInfoProto:
    kind = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    return onnx.helper.make_tensor_value_info(str(value.name), kind, None)
