"""The seam between the loop and whatever executes graphs: four small types that a backend provides.

The loop sees only this module. A backend owns device memory (`Tensor` is a typed view of it), loads graphs as
engines, and binds tensors to an engine's inputs and outputs once; a bound call then runs without arguments.
Host and device exchange values only through `Backend.write` and `Backend.read`, so every crossing is visible
and counted.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class ElementType(enum.Enum):
    """Element types that cross the seam; the value is (ONNX type number, bytes of one element)."""

    FLOAT = (1, 4)
    INT64 = (7, 8)
    BOOL = (9, 1)

    @property
    def onnx_type(self) -> int:
        """The number that ONNX gives the type (TensorProto.DataType)."""
        return self.value[0]

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A typed, contiguous view of device memory; `owner` keeps the memory alive."""

    address: int
    element_type: ElementType
    shape: tuple[int, ...]
    owner: object = field(repr=False, compare=False, default=None)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Number of bytes."""
        return self.size * self.element_type.bytes

    def view(self, *shape: int, offset: int = 0) -> Tensor:
        """The `shape` elements that start `offset` elements into this tensor.

        Raises ValueError where that reaches past the end.
        """
        if offset + math.prod(shape) > self.size:
            raise ValueError(f"a view of {shape} at {offset} does not fit into {self.shape}")
        return Tensor(self.address + offset * self.element_type.bytes, self.element_type, shape, self.owner)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a graph says of an input or output; symbolic dimensions are names."""

    name: str
    element_type: ElementType | None  # None: a type that the contract never uses
    shape: tuple[int | str, ...]


Call = Callable[[], None]
"""An engine with every input and output bound: calling it runs the graph."""


class Engine(Protocol):
    """One executable graph."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """The graph's inputs, in its order."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The graph's outputs, in its order."""

    def bind(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Call:
        """Bind every input and output; the tensors' values may change between calls, their places may not."""


class Backend(Protocol):
    """A device with its memory and its way to execute graphs.

    Work is ordered: what `write` and `copy` put into memory is seen by every later call, and `read` sees what
    every earlier call wrote.
    """

    @property
    def name(self) -> str:
        """Library and device, for people."""

    @property
    def identity(self) -> str:
        """Library, version, device and threads: what the time of a call depends on, beside graph and machine."""

    @property
    def bytes_to_host(self) -> int:
        """Bytes that `read` has moved to the host so far."""

    @property
    def engine_s(self) -> float:
        """Seconds spent inside bound calls so far."""

    @property
    def seconds_by_graph(self) -> Mapping[Path, float]:
        """The same by the graph that ran, as it was given to `load`: target, draft and sampling stages apart."""

    def load(self, graph: Path, *, weights_folder: Path | None = None) -> Engine:
        """Load a graph whose external data lies in `weights_folder` (default: beside it).

        Raises EngineError where the file cannot be loaded.
        """

    def allocate(self, element_type: ElementType, shape: Sequence[int]) -> Tensor:
        """Zeroed device memory. Raises BackendError where there is no room."""

    def write(self, tensor: Tensor, values: Sequence[int] | Sequence[float] | Sequence[bool]) -> None:
        """Host to device: fill the whole tensor, in row-major order."""

    def clear(self, tensor: Tensor) -> None:
        """Fill the whole tensor with zeros."""

    def read(self, tensor: Tensor) -> list[int]:
        """Device to host: an integer tensor's values, in row-major order."""

    def read_floats(self, tensor: Tensor) -> list[float]:
        """Device to host: a float tensor's values, in row-major order."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Device to device: the bytes of `source` over those of `target` (same number; they may not overlap)."""
