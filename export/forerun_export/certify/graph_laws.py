"""The graphs that turn logits into laws, against the oracle: numbers instead of decisions."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from forerun.oracle import Edit, Law, edited, filtered_law, law_of
from forerun_export.certify import graph_cases as cases
from forerun_export.certify.graph_cases import Random, Shape
from forerun_export.certify.graph_checks import Check, Compared
from forerun_export.certify.graph_sets import Array, GraphSet
from forerun_export.certify.margins import IMPOSSIBLE, UNIT, Margin

# exp(d) with |d| <= 87 carries 87 * 2^-23; sum and division carry less.
LAW_BOUND = 2e-5
SMALLEST_FLOAT = 2.0**-126  # below it float32 loses digits
TOP_LOGPROBS = 20


def law(graphs: GraphSet, rng: Random, shape: Shape) -> Iterator[Compared]:
    """softmax(logits / T); one-hot at T = 0."""
    feeds = cases.shaping(rng, shape)
    found = graphs.run("law", feeds)["p"]
    for b, r in np.ndindex(*found.shape[:2]):
        expected = law_of(feeds["logits"][b, r].tolist(), float(feeds["temperature"][b]))
        yield _laws(expected, found[b, r])


def law_filtered(graphs: GraphSet, rng: Random, shape: Shape) -> Iterator[Compared]:
    """The kept tokens, and what they are given. At a filter's edge rounding may keep or drop one more token."""
    feeds = cases.shaping(rng, shape)
    found = graphs.run("law-filtered", feeds)["p"]
    for b, r in np.ndindex(*found.shape[:2]):
        logits, p = feeds["logits"][b, r].tolist(), found[b, r]
        temperature, top_k = float(feeds["temperature"][b]), int(feeds["top_k"][b])
        top_p, min_p = float(feeds["top_p"][b]), float(feeds["min_p"][b])
        expected = filtered_law(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        if _kept(expected, p):
            yield _laws(expected, p)
            continue
        edge = LAW_BOUND
        fewer = filtered_law(logits, temperature, top_k=top_k, top_p=top_p - edge, min_p=min(1.0, min_p * (1 + edge)))
        more = filtered_law(logits, temperature, top_k=top_k, top_p=top_p + edge, min_p=min_p * (1 - edge))
        between = all(
            bool(y) <= (x > SMALLEST_FLOAT or x == 0) and bool(a > SMALLEST_FLOAT) <= bool(y) and bool(y) <= bool(x)
            for a, y, x in zip(fewer, p.tolist(), more, strict=True)
        )
        counts = (sum(x > 0 for x in expected), int(np.count_nonzero(p)))
        yield Compared(f"keeps {counts[0]}", f"keeps {counts[1]}", Margin(edge, edge) if between else IMPOSSIBLE)


def _kept(expected: Law, found: Array) -> bool:
    """Whether the same tokens are kept, leaving out those that float32 cannot hold."""
    wanted = np.asarray(expected)
    clear = (wanted == 0) | (wanted > SMALLEST_FLOAT)
    return bool(np.array_equal((wanted > 0)[clear], (found > 0)[clear]))


def _laws(expected: Law, found: Array) -> Compared:
    """The largest relative error of a probability; a zero must be one."""
    wanted, given = np.asarray(expected), found.astype(np.float64)
    errors = np.abs(given - wanted) / np.maximum(wanted, SMALLEST_FLOAT)
    # No law that was asked for is that far off by rounding; a NaN is not, either.
    if not np.all(errors <= LAW_BOUND):
        worst = float(np.nanmax(errors)) if not np.isnan(errors).all() else math.nan
        return Compared("a law", f"off by {worst:.1e}", Margin(math.inf, LAW_BOUND))
    return Compared("a law", "the same", None)


def edit(graphs: GraphSet, rng: Random, shape: Shape) -> Iterator[Compared]:
    """Edited logits to float32's last places."""
    feeds = cases.editing(rng, shape)
    found = graphs.run("edit", feeds)["edited"]
    for b, r in np.ndindex(*found.shape[:2]):
        numbers = (feeds[name][b, r].tolist() for name in ("edit_bias", "edit_penalty", "edit_shift"))
        edits = {
            token: Edit(*values) for token, *values in zip(feeds["edit_tokens"][b, r].tolist(), *numbers, strict=True)
        }
        wanted = np.array(edited(feeds["logits"][b, r].tolist(), edits, only=bool(feeds["only"][b, r])))
        size = np.abs(feeds["logits"][b, r].astype(np.float64)).clip(max=1e3) + 4.0
        with np.errstate(invalid="ignore"):  # -infinity in both
            same = (wanted == found[b, r]) | (np.abs(found[b, r] - wanted) <= 8 * UNIT * size)
        yield Compared("logits", "logits", None if same.all() else IMPOSSIBLE)


def logprobs(graphs: GraphSet, rng: Random, shape: Shape) -> Iterator[Compared]:
    """Logarithms of the law (at T = 0 of the softmax) at given tokens, and the largest of all in order."""
    rows, width, size = shape
    logits = cases.logits(rng, rows, width + 1, size)
    p = cases.softmax(logits)
    temperature = rng.choice([0.0, 1.0], rows)
    tokens = rng.integers(0, size, (rows, width + 1))
    feeds = {"p": p, "logits": logits, "temperature": temperature, "tokens": tokens}
    outputs = graphs.run("logprobs", feeds)
    for b, r in np.ndindex(rows, width + 1):
        given, top, which = (outputs[name][b, r] for name in ("logprob", "top_logprobs", "top_tokens"))
        with np.errstate(divide="ignore"):
            logs = np.log(p[b, r].astype(np.float64))
        largest = np.sort(logs)[::-1][: min(TOP_LOGPROBS, size)]
        fine = _close(given, logs[tokens[b, r]]) and _close(top, largest) and _close(top, _listed(logs, which))
        yield Compared("logarithms", "logarithms", None if fine else IMPOSSIBLE)


def _listed(logs: Array, tokens: Array) -> Array:
    """The logarithms of listed tokens; a place behind the vocabulary's end stands for -infinity."""
    return np.append(logs, -np.inf)[np.minimum(tokens, len(logs))]


def _close(found: Array, expected: Array) -> bool:
    tiny = math.log(SMALLEST_FLOAT)
    both = np.maximum(np.asarray(found, np.float64), tiny), np.maximum(np.asarray(expected, np.float64), tiny)
    return bool(np.all(np.abs(both[0] - both[1]) <= 2 * LAW_BOUND))


NUMBERS: Mapping[str, Check] = {
    "edit": edit,
    "law": law,
    "law-filtered": law_filtered,
    "logprobs": logprobs,
}
