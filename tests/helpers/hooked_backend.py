"""A backend that tells a hook before each of its operations; the hook may watch, or raise."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forerun
from forerun.backends.ort import OnnxRuntimeBackend
from forerun.engine import Call, ElementType, Tensor

Hook = Callable[[str, Tensor | None], None]
"""(operation: "call", "read", "write", "copy" or "allocate"; the tensor that is read or written)."""


class HookedBackend(OnnxRuntimeBackend):
    """onnxruntime, with `hook` in front of everything that touches memory or runs a graph."""

    hook: Hook | None = None

    def _tell(self, operation: str, tensor: Tensor | None = None) -> None:
        if self.hook is not None:
            self.hook(operation, tensor)

    def load(self, graph: Path, *, weights_folder: Path | None = None) -> Any:
        engine = super().load(graph, weights_folder=weights_folder)
        bind = engine.bind

        def hooked_bind(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Call:
            call = bind(inputs, outputs)

            def hooked_call() -> None:
                self._tell("call")
                call()

            return hooked_call

        engine.bind = hooked_bind  # type: ignore[method-assign]
        return engine

    def allocate(self, element_type: ElementType, shape: Sequence[int]) -> Tensor:
        self._tell("allocate")
        return super().allocate(element_type, shape)

    def write(self, tensor: Tensor, values: Sequence[Any]) -> None:
        self._tell("write", tensor)
        super().write(tensor, values)

    def read(self, tensor: Tensor) -> list[int]:
        self._tell("read", tensor)
        return super().read(tensor)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._tell("copy", target)
        super().copy(target, source)


def open_hooked(path: Path) -> tuple[forerun.Decoder, HookedBackend]:
    """A decoder of this engine directory, and its backend."""
    backend = HookedBackend()
    with patch("forerun.decoder.open_backend", lambda *_, **__: backend):
        return forerun.open(path), backend


class RaiseAt:
    """A hook that raises `error` at operation number `number` (from 0), and once only."""

    def __init__(self, number: int, error: BaseException, *, operation: str | None = None) -> None:
        self.number = number
        self.error = error
        self.operation = operation  # None: operations of every kind are counted
        self.seen = 0

    def __call__(self, operation: str, tensor: Tensor | None) -> None:
        if self.operation in (None, operation):
            self.seen += 1
            if self.seen == self.number + 1:
                raise self.error
