"""Sets of sampling graphs to hold to the oracle: an engine directory's own, and freshly built ones of a few tokens."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir
import onnxruntime

from forerun.backends.ort import THREAD_POOL, session_options
from forerun.manifest import Manifest
from forerun_export.sampling import SAMPLING_GRAPHS, sampling_model

Array = npt.NDArray[Any]
_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


class GraphSet(Protocol):
    """Sampling graphs of one vocabulary."""

    @property
    def vocabulary_size(self) -> int:
        """V."""

    def run(self, name: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name; inputs are converted to the types that the graph takes."""


class _Graphs:
    def __init__(self, vocabulary_size: int) -> None:
        THREAD_POOL.share(None)
        self.vocabulary_size = vocabulary_size
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}

    def _source(self, name: str) -> bytes | str:
        raise NotImplementedError

    def run(self, name: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """See `GraphSet.run`."""
        if name not in self._sessions:
            providers = ["CPUExecutionProvider"]
            self._sessions[name] = onnxruntime.InferenceSession(
                self._source(name), session_options(), providers=providers
            )
        session = self._sessions[name]
        converted: dict[str, Array] = {
            spec.name: np.ascontiguousarray(feeds[spec.name], _TYPES[spec.type]) for spec in session.get_inputs()
        }
        names = [spec.name for spec in session.get_outputs()]
        return dict(zip(names, session.run(names, converted), strict=True))


class BuiltGraphs(_Graphs):
    """The sampling graphs in an engine directory."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        super().__init__(manifest.target.architecture.vocabulary_size)
        self._files = {name: directory / file for name, file in manifest.sampling.items()}

    def _source(self, name: str) -> str:
        return str(self._files[name])


@functools.cache
def _content(name: str, vocabulary_size: int) -> bytes:
    content: bytes = onnx_ir.to_proto(sampling_model(SAMPLING_GRAPHS[name], vocabulary_size)).SerializeToString()
    return content


class FreshGraphs(_Graphs):
    """Graphs as an export would write them for this many tokens; `replaced` puts other ones in their place."""

    def __init__(self, vocabulary_size: int, replaced: Mapping[str, Callable[..., Any]] | None = None) -> None:
        super().__init__(vocabulary_size)
        self._replaced = replaced or {}

    def _source(self, name: str) -> bytes:
        if name not in self._replaced:
            return _content(name, self.vocabulary_size)
        content: bytes = onnx_ir.to_proto(
            sampling_model(self._replaced[name], self.vocabulary_size)
        ).SerializeToString()
        return content
