"""Log-probabilities of emitted tokens: the accepted, the corrected and the bonus alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from forerun.engine import Backend
from forerun.laws import Demands
from forerun.row import Row, TokenLogprob, Verdict
from forerun.sampling import Sampler, Shaped
from forerun.workspace import RoundTensors


def read_logprobs(
    backend: Backend,
    sampler: Sampler,
    shaped: Shaped,
    tensors: RoundTensors,
    demands: Demands,
    rows: Sequence[Row],
    verdicts: Sequence[Verdict],
) -> list[Verdict]:
    """The verdicts with the log-probabilities of their tokens, for the rows that want them."""
    width, outputs = tensors.draft_length + 1, shaped.side.logprobs
    emitted = [verdict.tokens for verdict in verdicts]
    backend.write(outputs["tokens"], [token for row in emitted for token in (*row, *[0] * (width - len(row)))])
    sampler.logprobs(shaped, tensors, demands)
    width_of_top = outputs["top_tokens"].shape[2]
    chosen = backend.read_floats(outputs["logprob"])
    top_logprobs, top_tokens = (
        backend.read_floats(outputs["top_logprobs"]),
        backend.read(outputs["top_tokens"]),
    )

    def at(place: int, token: int, count: int) -> TokenLogprob:
        start = place * width_of_top
        few = slice(start, start + min(count, width_of_top))
        pairs = zip(top_tokens[few], top_logprobs[few], strict=True)
        return TokenLogprob(token, chosen[place], tuple(pair for pair in pairs if pair[1] > -math.inf))

    found = []
    for index, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        if (count := row.controls.logprobs) is None:
            found.append(verdict)
            continue
        places = range(index * width, index * width + len(emitted[index]))
        listed = tuple(at(place, token, count) for place, token in zip(places, emitted[index], strict=True))
        found.append(dataclasses.replace(verdict, logprobs=listed))
    return found
