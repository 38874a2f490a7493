"""forerun: lossless speculative decoding on ONNX Runtime and TensorRT.

import forerun

with forerun.open("engines/smollm2") as decoder:
    print(decoder.generate("Write a haiku.", max_new_tokens=64).text)
"""

from __future__ import annotations

import os

from forerun.controls import Controls
from forerun.decoder import Decoder, Generation
from forerun.errors import BackendError, EngineError, ExportError, ForerunError, RequestError
from forerun.request import Prompt, Request
from forerun.row import Chunk
from forerun.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Chunk",
    "Controls",
    "Decoder",
    "EngineError",
    "ExportError",
    "ForerunError",
    "Generation",
    "Prompt",
    "Request",
    "RequestError",
    "Stats",
    "open",
]


def open(path: str | os.PathLike[str], *, threads: int | None = None, load_draft: bool = True) -> Decoder:
    """Open an engine directory for decoding; a context manager.

    `threads` sizes the one pool that all decoders of the process share (default: the CPUs it may use).
    Without `load_draft` the directory's draft stays unloaded and decoding is plain.

    Raises EngineError where the directory cannot be used, naming every reason, and BackendError where this
    installation has no backend for it.
    """
    return Decoder(path, threads=threads, load_draft=load_draft)
