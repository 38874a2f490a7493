"""A decoder engine with its caches: runs any number of rows, each at its own place in its own sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.cache import KeyValueCache
from forerun.contract import Features
from forerun.engine import Backend, Call, ElementType, Engine, Tensor
from forerun.manifest import Architecture

PREFILL_CHUNK = 128
"""Prompt tokens in one call: enough to keep matrix products busy, few enough to bound the activations."""
NOTHING: Mapping[str, Tensor] = {}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a binding depends on: the rows from `first_row` on, tokens and logit rows for each of them."""

    first_row: int
    rows: int
    tokens: int
    logit_rows: int


@dataclass(frozen=True, slots=True)
class BoundShape:
    """The tensors of one shape, and the call they are bound to."""

    input_ids: Tensor  # [B,S]
    position_ids: Tensor  # [B,S]
    write_indices: Tensor  # [B]
    logit_rows: Tensor  # [B,R]
    logits: Tensor  # [B,R,V]
    call: Call


class CachedModel:
    """One decoder (target or draft) on one backend, with the caches of its rows.

    `positions` is the number of positions that the graph knows: padding tokens past it are given its last one.
    """

    def __init__(
        self,
        engine: Engine,
        backend: Backend,
        architecture: Architecture,
        *,
        positions: int,
        features: Features = Features.NONE,
    ) -> None:
        self._engine = engine
        self._backend = backend
        self._positions = positions
        self._features = features
        self.architecture = architecture
        self.vocabulary_size = architecture.vocabulary_size
        self.cache = self._new_cache()
        self._bound: dict[tuple[object, ...], BoundShape] = {}
        self._bound_generation = 0
        self._chains: dict[tuple[int, int], Tensor] = {}

    def with_own_cache(self) -> CachedModel:
        """The same engine with a cache of its own, which is empty."""
        return CachedModel(
            self._engine, self._backend, self.architecture, positions=self._positions, features=self._features
        )

    def _new_cache(self) -> KeyValueCache:
        return KeyValueCache(self._backend, self.architecture, features=self._features is Features.KEPT)

    def release(self) -> None:
        """Let go of the cache and of everything bound to it."""
        self.cache = self._new_cache()
        self.forget()
        self._chains.clear()

    def forget(self) -> None:
        """Drop every binding, because tensors that are not this model's have moved."""
        self._bound.clear()

    def trim(self, rows: int, slots: int) -> None:
        """See `KeyValueCache.trim`. Bindings to the larger tensors go at once: they would keep them in memory."""
        self.cache.trim(rows, slots)
        self._drop_void_bindings()

    def _drop_void_bindings(self) -> None:
        if self._bound_generation != self.cache.generation:
            self._bound.clear()
            self._bound_generation = self.cache.generation

    def bind(
        self,
        shape: Shape,
        *,
        input_ids: Tensor,
        logits: Tensor,
        inputs: Mapping[str, Tensor] = NOTHING,
        outputs: Mapping[str, Tensor] = NOTHING,
    ) -> BoundShape:
        """The call for a shape, with the caller's `input_ids` [B,S] and `logits` [B,R,V]; bound on first use.

        `inputs` and `outputs` are what the graph has beside those of a decoder, by name.
        """
        self._drop_void_bindings()
        tensors = (input_ids, logits, *inputs.values(), *outputs.values())
        key = (shape, *(tensor.address for tensor in tensors))
        if (bound := self._bound.get(key)) is None:
            bound = self._bound[key] = self.bind_once(shape, input_ids, logits, inputs, outputs)
        return bound

    def bind_once(
        self,
        shape: Shape,
        input_ids: Tensor,
        logits: Tensor,
        inputs: Mapping[str, Tensor] = NOTHING,
        outputs: Mapping[str, Tensor] = NOTHING,
    ) -> BoundShape:
        """As `bind`, for a call that will not come again."""
        allocate = self._backend.allocate
        tokens = shape.tokens
        position_ids = allocate(ElementType.INT64, (shape.rows, tokens))
        write_indices = allocate(ElementType.INT64, (shape.rows,))
        logit_rows = allocate(ElementType.INT64, (shape.rows, shape.logit_rows))
        last_rows = list(range(tokens - shape.logit_rows, tokens))
        self._backend.write(logit_rows, last_rows * shape.rows)
        caches = list(self.cache.tensors(shape.first_row, shape.rows))
        call = self._engine.bind(
            {
                "input_ids": input_ids,
                "position_ids": position_ids,
                "write_indices": write_indices,
                "tree_mask": self._chain(shape.rows, tokens),
                "logit_rows": logit_rows,
                **inputs,
                **{name: tensor for name, _, tensor in caches},
            },
            {"logits": logits, **outputs, **{name: tensor for _, name, tensor in caches}},
        )
        return BoundShape(input_ids, position_ids, write_indices, logit_rows, logits, call)

    def _chain(self, rows: int, tokens: int) -> Tensor:
        """bool [B,S,S]: each new token sees those before it and itself. Kept: nothing ever changes it."""
        key = (rows, tokens)
        if key not in self._chains:
            self._chains[key] = self._backend.allocate(ElementType.BOOL, (rows, tokens, tokens))
            row = [seen <= token for token in range(tokens) for seen in range(tokens)]
            self._backend.write(self._chains[key], row * rows)
        return self._chains[key]

    def run(self, bound: BoundShape, write_indices: Sequence[int]) -> None:
        """Run a bound shape with row b's tokens written from slot `write_indices[b]` on."""
        tokens, last = bound.position_ids.shape[1], self._positions - 1
        positions = [min(start + step, last) for start in write_indices for step in range(tokens)]
        self._backend.write(bound.position_ids, positions)
        self._backend.write(bound.write_indices, write_indices)
        bound.call()

    def reread(self, tokens: Sequence[int]) -> KeyValueCache:
        """A fresh cache of one row that holds these tokens."""
        fresh = self.with_own_cache()
        fresh.cache.reserve(1, len(tokens))
        fresh.prefill(0, tokens)
        return fresh.cache

    def prefill(self, row: int, tokens: Sequence[int], *, cached: int = 0) -> None:
        """Put `tokens` into a row's cache from slot `cached` on, a chunk at a time.

        The caller has reserved room for them.
        """
        logits = self._backend.allocate(ElementType.FLOAT, (1, 1, self.vocabulary_size))
        ids = self._backend.allocate(ElementType.INT64, (1, PREFILL_CHUNK))
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            input_ids = ids.view(1, len(chunk))
            bound = self.bind_once(Shape(row, 1, len(chunk), 1), input_ids, logits)
            self._backend.write(input_ids, chunk)
            self.run(bound, [cached + start])
