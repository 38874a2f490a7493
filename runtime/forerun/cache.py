"""The caches of one model, keys and values and whatever else lies in slots: who owns which.

    row      0    1    2  ...      one row a sequence; rows in use are always 0 .. n-1
    slot     0 .. cached-1         the row's committed tokens (all but the pending one)
             cached .. capacity-1  stale: never seen, because the mask hides it, and overwritten in place

Rolling back is using a smaller write index. The capacity grows in steps, so that attention pays for the tokens in
use and not for the longest context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from forerun.engine import Backend, ElementType, Tensor
from forerun.manifest import Architecture

CAPACITY_STEP = 256
"""Slots by which capacity grows: a growth copies the cache, about as long as one call of the model."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One cache: its names in the graph, and its heads of so many numbers for each slot."""

    name: str
    written: str
    heads: int
    size: int


class KeyValueCache:
    """Tensors [rows, H, capacity, D], a key and a value for each layer.

    With `features`, one [rows, 1, capacity, h] more: what a draft head reads of this model.
    """

    def __init__(self, backend: Backend, architecture: Architecture, *, features: bool = False) -> None:
        self._backend = backend
        heads, size = architecture.kv_heads, architecture.head_size
        self._kinds = [
            _Kind(f"{kind}_cache.{layer}", f"{kind}_cache_out.{layer}", heads, size)
            for layer in range(architecture.layers)
            for kind in "kv"
        ]
        if features:
            self._kinds.append(_Kind("feature_cache", "feature_cache_out", 1, architecture.hidden_size))
        self.rows = 0
        self.capacity = 0
        self.generation = 0  # counts the times that tensors have moved
        self._tensors: list[Tensor] = []

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for `rows` rows of `slots` tokens; when tensors move, bindings to them are void.

        Raises BackendError where memory ends; the cache is then as it was.
        """
        if rows <= self.rows and slots <= self.capacity:
            return
        self._move(max(rows, self.rows), max(self.capacity, _round_up(slots, CAPACITY_STEP)))

    def _move(self, rows: int, capacity: int) -> None:
        """Into new tensors, with as much of the old ones' content as they hold."""
        shapes = [(rows, kind.heads, capacity, kind.size) for kind in self._kinds]
        grown = [self._backend.allocate(ElementType.FLOAT, shape) for shape in shapes]
        for new, old in zip(grown, self._tensors, strict=False):
            self._copy_rows(new, old)
        self.generation += 1  # first: an interrupt may void bindings that still hold, never keep those that do not
        self.rows, self.capacity, self._tensors = rows, capacity, grown

    def trim(self, rows: int, slots: int) -> None:
        """Give memory back where `rows` rows of `slots` tokens need a quarter of it or less; else leave it.

        Fails and moves as `reserve` does. Less than a quarter, so that rows which come and go move nothing.
        """
        rows, capacity = max(rows, 1), min(_round_up(max(slots, 1), CAPACITY_STEP), self.capacity)
        if 0 < 4 * rows * capacity <= self.rows * self.capacity:
            self._move(rows, capacity)

    def _copy_rows(self, new: Tensor, old: Tensor) -> None:
        _, heads, capacity, width = new.shape
        rows = min(new.shape[0], old.shape[0])
        if capacity == old.shape[2]:
            self._backend.copy(self._rows(new, 0, rows), self._rows(old, 0, rows))
            return
        size = min(capacity, old.shape[2]) * width
        for index in range(rows * heads):
            start, old_start = (index * tensor.shape[2] * width for tensor in (new, old))
            self._backend.copy(new.view(size, offset=start), old.view(size, offset=old_start))

    def end(self, row: int, last: int, *, clear: bool = False) -> None:
        """Row `row` has ended: row `last` is copied over it, every slot. A row that was never reserved holds nothing.

        `clear`: it may hold what is no number. The mask gives a stale slot the weight 0, but 0 * NaN is NaN: it must
        not stay for the next sequence of that row.
        """
        for tensor in self._tensors if row < self.rows else ():
            if row != last and last < self.rows:
                self._backend.copy(self._rows(tensor, row, 1), self._rows(tensor, last, 1))
            elif clear:
                self._backend.clear(self._rows(tensor, row, 1))

    def tensors(self, first_row: int, rows: int) -> Iterator[tuple[str, str, Tensor]]:
        """(input name, output name, tensor) of each cache, for the rows from `first_row` on."""
        for kind, tensor in zip(self._kinds, self._tensors, strict=False):
            yield kind.name, kind.written, self._rows(tensor, first_row, rows)

    def features(self, first_row: int, rows: int) -> Tensor:
        """The features [rows,1,C,h] of the rows from `first_row` on, of a cache that has them and room for these."""
        return self._rows(self._tensors[-1], first_row, rows)

    def _rows(self, tensor: Tensor, first_row: int, rows: int) -> Tensor:
        shape = (rows, *tensor.shape[1:])
        return tensor.view(*shape, offset=first_row * math.prod(shape[1:]))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
