"""A decoder graph run from numpy arrays: for parity checks, tests and benches, never in production."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from forerun.backends.ort import session_options
from forerun.errors import ExportError

Floats = npt.NDArray[np.float32]
NOTHING: Mapping[str, npt.NDArray[Any]] = {}


class Caches:
    """The key and value caches [B,H,C,D] of every layer, zeroed, written in place by `GraphRunner.run`."""

    def __init__(self, shapes: Mapping[str, tuple[int, int, int, int]]) -> None:
        empty = onnxruntime.OrtValue.ortvalue_from_numpy
        self.values = {name: empty(np.zeros(shape, np.float32)) for name, shape in shapes.items()}

    def numpy(self, name: str) -> Floats:
        """A copy of one cache [B,H,C,D], for example `k_cache.0`."""
        copy: Floats = self.values[name].numpy()
        return copy


class GraphRunner:
    """One decoder graph in contract form on onnxruntime's CPU provider, on the process-wide thread pool.

    `weights_folder` is where the graph's external data lies, if not beside the graph (a draft that shares the
    target's weights). Raises ExportError if onnxruntime cannot load the graph.
    """

    first_place = 0

    def __init__(self, graph_path: Path, *, weights_folder: Path | None = None, threads: int | None = None) -> None:
        options = session_options(weights_folder=weights_folder or graph_path.parent, threads=threads)
        try:
            self._session = onnxruntime.InferenceSession(str(graph_path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ExportError(f"onnxruntime cannot load {graph_path}: {reason}; export it again") from error
        self._cache_sizes = {
            node.name: (int(node.shape[1]), int(node.shape[3]))
            for node in self._session.get_inputs()
            if "_cache" in node.name
        }
        self.vocabulary_size = int(self._session.get_outputs()[0].shape[2])

    def new_caches(self, batch: int, capacity: int) -> Caches:
        """Empty caches for `batch` rows of `capacity` slots."""
        return Caches({name: (batch, heads, capacity, size) for name, (heads, size) in self._cache_sizes.items()})

    def run(
        self,
        caches: Caches,
        tokens: npt.ArrayLike,
        write_indices: Sequence[int],
        *,
        positions: npt.ArrayLike | None = None,
        tree_mask: npt.ArrayLike | None = None,
        logit_rows: npt.ArrayLike | None = None,
        more: Mapping[str, npt.NDArray[Any]] = NOTHING,
    ) -> Floats:
        """Write `tokens` [B,S] into the caches from slot `write_indices[b]` on; the logits [B,R,V] of `logit_rows`.

        By default the tokens are a chain, at the positions of their slots, and every row has logits (R = S).
        `more` are inputs that only some graphs have.
        """
        feeds = {**_feeds(tokens, write_indices, positions, tree_mask, logit_rows), **more}
        return self._run_bound(feeds, caches, ["logits"])["logits"]

    def run_with_hidden(
        self,
        caches: Caches,
        tokens: npt.ArrayLike,
        write_indices: Sequence[int],
        *,
        more: Mapping[str, npt.NDArray[Any]],
    ) -> tuple[Floats, Floats]:
        """As `run`, of a head, with its output [B,1,S,h] beside the logits."""
        outputs = self._run_bound({**_feeds(tokens, write_indices), **more}, caches, ["logits", "hidden"])
        return outputs["logits"], outputs["hidden"]

    def observe(
        self,
        caches: Caches,
        tokens: npt.ArrayLike,
        write_indices: Sequence[int],
        *,
        more: Mapping[str, npt.NDArray[Any]] = NOTHING,
    ) -> dict[str, Floats]:
        """As `run`, but what other outputs the graph has than logits and caches, by name."""
        names = [node.name for node in self._session.get_outputs()]
        others = [name for name in names if name != "logits" and "_cache_out" not in name]
        return self._run_bound({**_feeds(tokens, write_indices), **more}, caches, others)

    def _run_bound(
        self, feeds: Mapping[str, npt.NDArray[Any]], caches: Caches, outputs: Sequence[str]
    ) -> dict[str, Floats]:
        binding = self._session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name, value in caches.values.items():
            binding.bind_ortvalue_input(name, value)
        for name in outputs:
            binding.bind_output(name)
        for name, value in caches.values.items():
            binding.bind_ortvalue_output(name.replace("_cache", "_cache_out"), value)
        self._session.run_with_iobinding(binding)
        found = binding.get_outputs()
        return {name: found[place].numpy() for place, name in enumerate(outputs)}


def _feeds(
    tokens: npt.ArrayLike,
    write_indices: Sequence[int],
    positions: npt.ArrayLike | None = None,
    tree_mask: npt.ArrayLike | None = None,
    logit_rows: npt.ArrayLike | None = None,
) -> Mapping[str, npt.NDArray[Any]]:
    """The graph's inputs beside its caches, with the defaults of `GraphRunner.run`."""
    ids = np.asarray(tokens, np.int64)
    batch, new = ids.shape
    write = np.asarray(write_indices, np.int64)
    if positions is None:
        positions = write[:, None] + np.arange(new)
    if tree_mask is None:
        tree_mask = np.broadcast_to(np.tril(np.ones((new, new), bool)), (batch, new, new))
    if logit_rows is None:
        logit_rows = np.broadcast_to(np.arange(new), (batch, new))
    return {
        "input_ids": ids,
        "position_ids": np.ascontiguousarray(positions, np.int64),
        "write_indices": write,
        "tree_mask": np.ascontiguousarray(tree_mask, bool),
        "logit_rows": np.ascontiguousarray(logit_rows, np.int64),
    }
