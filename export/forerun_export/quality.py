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

from forerun_export.graph_runner import Floats
from forerun_export.head_runner import Runner
from forerun_export.passes.smaller_head import LOWEST
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


def save_logits(runner: Runner, pieces: Sequence[Sequence[int]], path: Path, *, report: Report = silent) -> None:
    """Write the logits [tokens,V] of every place that has a next token, as float32, to `path`."""
    with open(path, "wb") as file:
        for _, logits in _rows(runner, pieces, report):
            file.write(logits.tobytes())


def distance(runner: Runner, pieces: Sequence[Sequence[int]], reference: Path, *, report: Report = silent) -> Distance:
    """Compare with the logits that `save_logits` wrote to `reference` for the same pieces."""
    expected: npt.NDArray[np.float32] = np.memmap(reference, np.float32, "r")
    rows = expected.reshape(-1, runner.vocabulary_size)
    sums, done = np.zeros(5), 0
    for following, logits in _rows(runner, pieces, report):
        count = len(following)
        sums += _sums(logits, rows[done : done + count], following)
        done += count
    loss, loss_fp32, known, same, divergence = map(float, sums)
    perplexity, perplexity_fp32 = (float(np.exp(total / max(known, 1))) for total in (loss, loss_fp32))
    return Distance(done, perplexity, perplexity_fp32, same / done, divergence / done)


def _sums(logits: Floats, expected: Floats, following: Sequence[int]) -> npt.NDArray[np.float64]:
    """Over some rows [n,V]: -log p(next) of both and of how many, how many argmaxes agree, and KL(expected || given).

    A next token that a head never proposes has no logit, and is left out of the first three.
    """
    log_q, log_p = _log_law(logits), _log_law(expected)
    places = np.arange(len(following)), np.asarray(following)
    known = logits[places] > LOWEST
    losses = [-log_law[places][known].sum() for log_law in (log_q, log_p)]
    same = np.sum(logits.argmax(axis=1) == expected.argmax(axis=1))
    divergence = np.sum(np.exp(log_p) * (log_p - log_q))
    return np.array([*losses, known.sum(), same, divergence])


def _log_law(logits: Floats) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_law: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_law


def _rows(runner: Runner, pieces: Sequence[Sequence[int]], report: Report) -> Iterator[tuple[Sequence[int], Floats]]:
    """(next tokens, logits [n,V]) of chunks of every piece."""
    total, done = sum(map(len, pieces)), 0
    for piece in pieces:
        caches = runner.new_caches(1, len(piece))
        for start in range(0, len(piece) - 1, CHUNK):
            report("reading the text", done + start, total)
            chunk = piece[start : min(start + CHUNK, len(piece) - 1)]
            skipped = runner.first_place if start == 0 else 0  # a head has nothing to say behind a single token
            following = piece[start + 1 + skipped : start + 1 + len(chunk)]
            yield following, runner.run(caches, [chunk], [start])[0][skipped:]
        done += len(piece)
