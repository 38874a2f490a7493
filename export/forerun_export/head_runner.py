"""A draft head run from numpy arrays behind its target, as `GraphRunner` runs a decoder."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from forerun_export.graph_runner import Caches, Floats, GraphRunner


class Runner(Protocol):
    """What reads a text token by token. `first_place` of a sequence is the first that has logits."""

    first_place: int
    vocabulary_size: int

    def new_caches(self, batch: int, capacity: int) -> Caches:
        """See `GraphRunner.new_caches`."""

    def run(
        self,
        caches: Caches,
        tokens: npt.ArrayLike,
        write_indices: Sequence[int],
        *,
        logit_rows: npt.ArrayLike | None = None,
    ) -> Floats:
        """See `GraphRunner.run`."""

    def observe(self, caches: Caches, tokens: npt.ArrayLike, write_indices: Sequence[int]) -> dict[str, Floats]:
        """See `GraphRunner.observe`."""


class HeadCaches(Caches):
    """A head's caches, and those of its target, features among them."""

    def __init__(self, head: Caches, target: Caches) -> None:
        self.values = head.values
        self.target = target


class HeadRunner:
    """The head's laws of what follows each token, given the target's features of all tokens before it.

    The first token of a sequence has no such law, so that its row of logits is 0.
    """

    first_place = 1

    def __init__(self, head: GraphRunner, target: GraphRunner) -> None:
        self._head = head
        self._target = target
        self.vocabulary_size = head.vocabulary_size

    def new_caches(self, batch: int, capacity: int) -> HeadCaches:
        """See `GraphRunner.new_caches`."""
        return HeadCaches(self._head.new_caches(batch, capacity), self._target.new_caches(batch, capacity))

    def run(
        self,
        caches: Caches,
        tokens: npt.ArrayLike,
        write_indices: Sequence[int],
        *,
        logit_rows: npt.ArrayLike | None = None,
    ) -> Floats:
        """Logits [B,S,V]; tokens [B,S] come right behind those that the caches hold, or all rows are empty.

        `logit_rows` changes nothing: it lets whoever needs no logits say so.
        """
        ids = np.asarray(tokens, np.int64)
        new, slots, more = self._entries(caches, ids, write_indices)
        logits = np.zeros((*ids.shape, self.vocabulary_size), np.float32)
        if new.shape[1]:
            logits[:, ids.shape[1] - new.shape[1] :] = self._head.run(caches, new, slots, more=more)
        return logits

    def observe(self, caches: Caches, tokens: npt.ArrayLike, write_indices: Sequence[int]) -> dict[str, Floats]:
        """See `GraphRunner.observe`: of the head, for two tokens or more."""
        ids = np.asarray(tokens, np.int64)
        new, slots, more = self._entries(caches, ids, write_indices)
        return self._head.observe(caches, new, slots, more=more)

    def draft(self, caches: Caches, tokens: Sequence[int], start: int) -> Floats:
        """Logits [steps,V] of a round of one row: its pending token, in slot `start`, and proposals.

        The first entry reads the target's features, every other one the output of the one before.
        """
        new, slots, more = self._entries(caches, np.asarray([tokens[:1]], np.int64), [start])
        rows = []
        for step, token in enumerate(tokens):
            logits, hidden = self._head.run_with_hidden(caches, new if step == 0 else [[token]], slots, more=more)
            rows.append(logits[0])
            slots, more = [slots[0] + 1], {"features": hidden, "feature_rows": np.zeros((1, 1), np.int64)}
        return np.concatenate(rows)

    def _entries(
        self, caches: Caches, ids: npt.NDArray[np.int64], write_indices: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], list[int], dict[str, npt.NDArray[Any]]]:
        """Let the target read the tokens. Then the head's tokens and slots, of which slot i is that of token i + 1."""
        assert isinstance(caches, HeadCaches)
        self._target.run(caches.target, ids, write_indices, logit_rows=[[0]] * len(ids))
        first = int(write_indices[0] == 0)  # a sequence's first token has no entry
        slots = [start + first - 1 for start in write_indices]
        new = ids[:, first:]
        rows = np.asarray(slots, np.int64)[:, None] + np.arange(new.shape[1])
        return new, slots, {"features": caches.target.numpy("feature_cache"), "feature_rows": rows}
