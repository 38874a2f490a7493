"""The header of a GGUF file: architecture numbers, the tokenizer, and how long the file must be.

gguf.GGUFReader makes several arrays for each string, which takes seconds for a vocabulary.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from forerun.errors import ExportError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_Part = TypeVar("_Part")


def read_metadata(path: Path) -> dict[str, object]:
    """Every key with its value: int, float, bool, str, or a list of those.

    Raises ExportError, naming the file, if it is no little-endian GGUF of version 2 or 3, or damaged.
    """
    return _read(path, _Reader.metadata)


def check_complete(path: Path) -> None:
    """Raises ExportError, naming the file, if it ends before its last tensor, or as `read_metadata` does."""
    needed, size = _read(path, _Reader.end_of_tensors), path.stat().st_size
    if size < needed:
        raise ExportError(f"{path} is truncated: {size} bytes, its tensors need {needed}; download it again")


def _read(path: Path, part: Callable[["_Reader"], _Part]) -> _Part:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return part(_Reader(path, data))
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error.strerror}); check the path") from error
    except (ValueError, KeyError, struct.error) as error:
        raise ExportError(f"{path} is empty, truncated or damaged; download it again") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._tensors = 0

    def metadata(self) -> dict[str, object]:
        if self._take(4) != b"GGUF":
            raise ExportError(f"{self._path} is no GGUF file; pass a .gguf file or a Hugging Face folder")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ExportError(
                f"{self._path} is GGUF version {version} or big-endian; convert it to little-endian version 3"
            )
        self._tensors = self._scalar("Q")
        return {self._string(): self._value(self._scalar("I")) for _ in range(self._scalar("Q"))}

    def end_of_tensors(self) -> int:
        """The offset in the file at which the last tensor ends."""
        alignment = self.metadata().get("general.alignment", 32)
        assert isinstance(alignment, int)
        ends = [self._tensor_end() for _ in range(self._tensors)]
        return -(-self._at // alignment) * alignment + max(ends, default=0)

    def _tensor_end(self) -> int:
        """Where one tensor ends, counted from the start of all tensors."""
        from gguf.constants import GGML_QUANT_SIZES

        self._string()  # its name
        elements = math.prod(self._scalar("Q") for _ in range(self._scalar("I")))
        block, block_bytes = GGML_QUANT_SIZES[self._scalar("I")]
        return int(self._scalar("Q") + elements // block * block_bytes)

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        return self._scalars(_SCALARS[kind], 1)[0]

    def _array(self, kind: int, length: int) -> list[object]:
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(length)]
        return list(self._scalars(_SCALARS[kind], length))

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode()

    def _scalar(self, code: str) -> int:
        return int(self._scalars(code, 1)[0])

    def _scalars(self, code: str, length: int) -> tuple[int | float | bool, ...]:
        data = self._take(length * struct.calcsize(f"<{code}"))
        return struct.unpack(f"<{length}{code}", data)

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise ValueError("a length passes the end of the file")
        data = self._data[self._at : end]
        self._at = end
        return data
