"""What cheaper weights cost: a quantized graph against itself in float32, on a fixed text.

The text (quality_text.txt) is prose, conversation and code; it is cut into windows, and each window is read from an
empty cache. The logits of the float32 graph wait in a file, so that the two models need not be in memory together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun_export.graph_runner import Floats, GraphRunner
from forerun_export.progress import Report, silent

WINDOW = 512
"""Tokens read from one empty cache."""
CHUNK = 64
"""Rows of logits in memory together."""


def text() -> str:
    """The fixed text."""
    return resources.files(__package__).joinpath("quality_text.txt").read_text("utf-8")


def windows(tokens: Sequence[int], *, context: int) -> list[Sequence[int]]:
    """The tokens in pieces of WINDOW, or of the context where that is shorter; a last single token is left out."""
    length = min(WINDOW, context)
    pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    return [piece for piece in pieces if len(piece) > 1]


@dataclass(frozen=True)
class Distance:
    """A graph against another on the same text; the fields are those of `forerun.manifest.Quantization`."""

    tokens: int
    perplexity: float
    perplexity_fp32: float
    greedy_agreement: float
    mean_kl: float


def save_logits(runner: GraphRunner, pieces: Sequence[Sequence[int]], path: Path, *, report: Report = silent) -> None:
    """Write the logits [tokens,V] of every place that has a next token, as float32, to `path`."""
    with open(path, "wb") as file:
        for _, logits in _rows(runner, pieces, report):
            file.write(logits.tobytes())


def distance(
    runner: GraphRunner, pieces: Sequence[Sequence[int]], reference: Path, *, report: Report = silent
) -> Distance:
    """Compare with the logits that `save_logits` wrote to `reference` for the same pieces."""
    expected: npt.NDArray[np.float32] = np.memmap(reference, np.float32, "r")
    rows = expected.reshape(-1, runner.vocabulary_size)
    sums, done = np.zeros(4), 0
    for following, logits in _rows(runner, pieces, report):
        count = len(following)
        sums += _sums(logits, rows[done : done + count], following)
        done += count
    loss, loss_fp32, same, divergence = (float(total) / done for total in sums)
    return Distance(done, float(np.exp(loss)), float(np.exp(loss_fp32)), same, divergence)


def _sums(logits: Floats, expected: Floats, following: Sequence[int]) -> npt.NDArray[np.float64]:
    """Over some rows [n,V]: -log p(next) of both, how many argmaxes agree, and KL(expected || given)."""
    log_q, log_p = _log_law(logits), _log_law(expected)
    places = np.arange(len(following)), np.asarray(following)
    same = np.sum(logits.argmax(axis=1) == expected.argmax(axis=1))
    divergence = np.sum(np.exp(log_p) * (log_p - log_q))
    return np.array([-log_q[places].sum(), -log_p[places].sum(), same, divergence])


def _log_law(logits: Floats) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_law: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_law


def _rows(
    runner: GraphRunner, pieces: Sequence[Sequence[int]], report: Report
) -> Iterator[tuple[Sequence[int], Floats]]:
    """(next tokens, logits [n,V]) of chunks of every piece."""
    total, done = sum(map(len, pieces)), 0
    for piece in pieces:
        caches = runner.new_caches(1, len(piece))
        for start in range(0, len(piece) - 1, CHUNK):
            report("reading the text", done + start, total)
            chunk = piece[start : min(start + CHUNK, len(piece) - 1)]
            yield piece[start + 1 : start + 1 + len(chunk)], runner.run(caches, [chunk], [start])[0]
        done += len(piece)
