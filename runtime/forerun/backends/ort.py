"""onnxruntime on the CPU: device memory is host memory, reached through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from forerun.engine import Call, ElementType, Tensor, TensorSpec
from forerun.errors import BackendError, EngineError

CTYPES: Mapping[ElementType, Any] = {
    ElementType.FLOAT: ctypes.c_float,
    ElementType.INT64: ctypes.c_int64,
    ElementType.BOOL: ctypes.c_bool,
}
ELEMENT_TYPES = {
    "tensor(float)": ElementType.FLOAT,
    "tensor(int64)": ElementType.INT64,
    "tensor(bool)": ElementType.BOOL,
}


class _ThreadPool:
    """The process-wide pool that all sessions share.

    Sessions with a pool each fight for the cores: a verify then takes almost twice as long. onnxruntime lets
    the pool be sized once in a process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.threads: int | None = None

    def share(self, threads: int | None) -> None:
        """Size the pool on first use. Raises BackendError where it exists with another size."""
        with self._lock:
            if self.threads is None:
                self.threads = threads or len(os.sched_getaffinity(0))
                # It fails where the application has made the pool itself: then that one is shared.
                with contextlib.suppress(Exception):
                    onnxruntime.set_global_thread_pool_sizes(self.threads, 1)
            elif threads not in (None, self.threads):
                raise BackendError(
                    f"threads={threads}: this process already runs {self.threads}, in one pool for all decoders; "
                    "give the number when the first one is opened"
                )


THREAD_POOL = _ThreadPool()


def session_options(*, weights_folder: Path | None = None, threads: int | None = None) -> onnxruntime.SessionOptions:
    """Options of a session on the shared pool; any other session of the process must set the same on its own.

    `weights_folder` is where external data lies, if not beside the graph: with it a draft's graph may name the
    target's weight file, where onnxruntime refuses "../" and links.
    """
    THREAD_POOL.share(threads)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.use_per_session_threads = False
    if weights_folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights_folder))
    return options


class OnnxRuntimeEngine:
    """One onnxruntime session."""

    def __init__(self, session: onnxruntime.InferenceSession, backend: OnnxRuntimeBackend, graph: Path) -> None:
        self._session = session
        self._backend = backend
        self._graph = graph
        self.inputs = tuple(_spec(node) for node in session.get_inputs())
        self.outputs = tuple(_spec(node) for node in session.get_outputs())

    def bind(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Call:
        """See `Engine.bind`."""
        binding = self._session.io_binding()
        for names, bind in ((inputs, binding.bind_input), (outputs, binding.bind_output)):
            for name, tensor in names.items():
                bind(name, "cpu", 0, tensor.element_type.onnx_type, list(tensor.shape), tensor.address)
        run, backend, clock = self._session.run_with_iobinding, self._backend, time.perf_counter
        graph, seconds_by_graph = self._graph, self._backend.seconds_by_graph
        alive = (*inputs.values(), *outputs.values())  # the binding holds addresses only

        def call(_alive: object = alive) -> None:
            started = clock()
            try:
                run(binding)
            except Exception as error:
                raise BackendError(f"onnxruntime failed while running: {first_line(error)}") from error
            finally:
                seconds = clock() - started
                backend.engine_s += seconds
                seconds_by_graph[graph] += seconds

        return call


class OnnxRuntimeBackend:
    """Sessions and memory of onnxruntime's CPU provider. `threads`: CPU threads of the shared pool."""

    name = "onnxruntime-cpu"

    def __init__(self, *, threads: int | None = None) -> None:
        THREAD_POOL.share(threads)
        self.identity = f"{self.name} {onnxruntime.__version__}, {THREAD_POOL.threads} threads"
        self.bytes_to_host = 0
        self.engine_s = 0.0
        self.seconds_by_graph: dict[Path, float] = {}

    def load(self, graph: Path, *, weights_folder: Path | None = None) -> OnnxRuntimeEngine:
        """See `Backend.load`."""
        options = session_options(weights_folder=weights_folder)
        try:
            session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise EngineError(
                f"{graph}: onnxruntime cannot load it ({first_line(error)}); export the pair again"
            ) from error
        self.seconds_by_graph.setdefault(graph, 0.0)
        return OnnxRuntimeEngine(session, self, graph)

    def allocate(self, element_type: ElementType, shape: Sequence[int]) -> Tensor:
        """See `Backend.allocate`."""
        try:
            value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), element_type.onnx_type, "cpu", 0)
        except Exception as error:
            raise BackendError(
                f"no room for a tensor of {list(shape)} ({first_line(error)}); use a smaller batch or context"
            ) from error
        tensor = Tensor(value.data_ptr(), element_type, tuple(shape), owner=value)
        self.clear(tensor)
        return tensor

    def write(self, tensor: Tensor, values: Sequence[int] | Sequence[float] | Sequence[bool]) -> None:
        """See `Backend.write`."""
        _host_array(tensor)[:] = values

    def clear(self, tensor: Tensor) -> None:
        """See `Backend.clear`."""
        ctypes.memset(tensor.address, 0, tensor.bytes)

    def read(self, tensor: Tensor) -> list[int]:
        """See `Backend.read`."""
        self.bytes_to_host += tensor.bytes
        return list(_host_array(tensor))

    def read_floats(self, tensor: Tensor) -> list[float]:
        """See `Backend.read_floats`."""
        self.bytes_to_host += tensor.bytes
        return list(_host_array(tensor))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Backend.copy`."""
        if target.bytes != source.bytes:
            raise ValueError(f"a copy of {source.bytes} bytes into {target.bytes}")
        ctypes.memmove(target.address, source.address, source.bytes)


def _host_array(tensor: Tensor) -> Any:
    return (CTYPES[tensor.element_type] * tensor.size).from_address(tensor.address)


def _spec(node: Any) -> TensorSpec:
    return TensorSpec(node.name, ELEMENT_TYPES.get(node.type), tuple(node.shape))


def first_line(error: Exception) -> str:
    """An onnxruntime error's own words, without its code and further lines."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", lines[0])
