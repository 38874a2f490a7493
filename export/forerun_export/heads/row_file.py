"""Numbers for every token of many texts, in 16 bits on disk: what is there already is not computed again."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ExportError

BYTES = 2  # of a number


class RowFile:
    """NAME.f16, rows of `width` numbers one text after another, and NAME.jsonl, which says where each text's begin."""

    def __init__(self, folder: Path, name: str, width: int) -> None:
        self._data, self._index = folder / f"{name}.f16", folder / f"{name}.jsonl"
        self._width = width
        self._places = self._read_index()
        self._end = sum(length for _, length in self._places.values())

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def add(self, number: int, rows: Tensor) -> None:
        """Append a text's rows [T,width] in float16; they count once the index names them."""
        with self._data.open("r+b" if self._data.exists() else "w+b") as file:
            file.seek(self._end * self._width * BYTES)
            file.write(rows.numpy().tobytes())
        self._places[number] = self._end, len(rows)
        with self._index.open("a") as index:
            index.write(json.dumps({"number": number, "row": self._end, "rows": len(rows)}) + "\n")
        self._end += len(rows)

    def read(self, number: int, length: int) -> Tensor:
        """A text's rows [length,width], which come from disk as they are used.

        Raises ExportError if the file has another number of them.
        """
        row, rows = self._places[number]
        if rows != length:
            raise ExportError(f"{self._index} belongs to other answers; remove it, and it is made again")
        # Copy on write: torch has no tensors that must not be written to.
        mapped = np.memmap(self._data, np.float16, "c", row * self._width * BYTES, (rows, self._width))
        return torch.from_numpy(mapped)

    def _read_index(self) -> dict[int, tuple[int, int]]:
        if not self._index.exists():
            return {}
        text = self._index.read_text()
        entries = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return {entry["number"]: (entry["row"], entry["rows"]) for entry in entries}
