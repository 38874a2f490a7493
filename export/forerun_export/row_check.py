"""Whether a built graph gives a row the same bits whatever S and B are, on this machine: what losslessness rests on."""

import numpy as np

from forerun.errors import ExportError
from forerun_export.graph_runner import Floats
from forerun_export.head_runner import Runner

PREFIX, NEW = 5, 17
CAPACITY = 64
WIDTHS = (2, 3, 5, 8, 12, NEW)
"""New tokens in one call."""


def check(runner: Runner, *, precision: str) -> None:
    """Decode the same tokens one by one, several at once, and beside other rows.

    Raises ExportError where a logit differs in any bit: the format cannot be offered then.
    """
    tokens = [(7919 * place * place + 31) % runner.vocabulary_size for place in range(PREFIX + NEW)]
    single = np.concatenate([_after_prefix(runner, [tokens], place, 1)[0] for place in range(NEW)])
    others = [tokens[::-1], tokens, tokens[1:] + tokens[:1]]
    for width in WIDTHS:
        alone, beside = _after_prefix(runner, [tokens], 0, width)[0], _after_prefix(runner, others, 0, width)[1]
        if not (np.array_equal(alone, single[:width]) and np.array_equal(beside, single[:width])):
            raise ExportError(
                f"in {precision}, logits depend on how many tokens share a call (seen with {width}): speculation would "
                "change the output with this onnxruntime on this machine; choose another precision"
            )


def _after_prefix(runner: Runner, rows: list[list[int]], first: int, count: int) -> Floats:
    """Logits [B,count,V] of the new tokens from number `first` on."""
    start = PREFIX + first
    caches = runner.new_caches(len(rows), CAPACITY)
    runner.run(caches, [row[:start] for row in rows], [0] * len(rows), logit_rows=[[0]] * len(rows))
    return runner.run(caches, [row[start : start + count] for row in rows], [start] * len(rows))
