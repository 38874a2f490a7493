"""What a front end gives: a graph with its weights, and the numbers of the architecture."""

from dataclasses import dataclass

import onnx_ir as ir

from forerun.errors import ExportError
from forerun.manifest import Architecture


@dataclass(frozen=True)
class FrontendGraph:
    """A front end's graph with its weights, and the numbers of the architecture.

    `softcap` is where the configuration caps attention scores (Gemma 2); None if nowhere.
    """

    model: ir.Model
    architecture: Architecture
    softcap: float | None = None


class CannotExpressError(ExportError):
    """A front end cannot make a decoder of this architecture; another one may."""
