"""Backends: one module each, chosen by the engine directory's manifest."""

from __future__ import annotations

from forerun.engine import Backend
from forerun.errors import BackendError


def open_backend(name: str, device: str, *, threads: int | None = None) -> Backend:
    """The backend that runs engines built for `name` on `device`.

    `threads` is the number of CPU threads of the process-wide pool (default: the CPUs this process may use).
    Raises BackendError for a backend that this installation does not have.
    """
    if (name, device) == ("onnxruntime", "cpu"):
        from forerun.backends.ort import OnnxRuntimeBackend

        return OnnxRuntimeBackend(threads=threads)
    raise BackendError(
        f"these engines are for {name} on {device}, this forerun runs onnxruntime on cpu; "
        "export the pair again with --device cpu"
    )
