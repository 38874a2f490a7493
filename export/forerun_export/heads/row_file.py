"""Numbers for every token of many texts, in 16 bits on disk: what is there already is not computed again."""

import hashlib
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ExportError
from forerun_export.heads.json_lines import append_line, read_lines

BYTES = 2  # of a number


def tokens_key(tokens: Iterable[int]) -> str:
    """What rows are found by: they are those of these very tokens, wherever a text comes from."""
    return hashlib.sha256(array("i", tokens).tobytes()).hexdigest()[:16]


class RowFile:
    """NAME.f16, rows of `width` numbers one text after another, and NAME.jsonl, which says where each text's begin."""

    def __init__(self, folder: Path, name: str, width: int) -> None:
        self._data, self._index = folder / f"{name}.f16", folder / f"{name}.jsonl"
        self._width = width
        try:
            self._places = {entry["text"]: (int(entry["row"]), int(entry["rows"])) for entry in read_lines(self._index)}
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged() from error
        self._end = sum(rows for _, rows in self._places.values())
        if self._end and self._size() < self._end * width * BYTES:
            raise self._damaged()
        self._mapped: Tensor | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def add(self, key: str, rows: Tensor) -> None:
        """Append a text's rows [T,width] in float16, unless they are there; they count once the index names them."""
        if key in self._places:
            return
        with self._data.open("r+b" if self._data.exists() else "w+b") as file:
            file.seek(self._end * self._width * BYTES)
            file.write(rows.numpy().tobytes())
        append_line(self._index, {"text": key, "row": self._end, "rows": len(rows)})
        self._places[key] = self._end, len(rows)
        self._end += len(rows)
        self._mapped = None

    def read(self, key: str) -> Tensor:
        """A text's rows [T,width], which come from disk as they are used."""
        if self._mapped is None:
            # All of them at once: each mapping costs one of the files that a process may have open. Copy on write,
            # because torch has no tensors that must not be written to.
            mapped = np.memmap(self._data, np.float16, "c", 0, (self._end, self._width))
            self._mapped = torch.from_numpy(mapped)
        row, rows = self._places[key]
        return self._mapped[row : row + rows]

    def _size(self) -> int:
        return self._data.stat().st_size if self._data.exists() else 0

    def _damaged(self) -> ExportError:
        return ExportError(f"{self._index} does not fit {self._data.name}; remove both, and they are made again")
