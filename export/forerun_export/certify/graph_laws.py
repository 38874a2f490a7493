"""The graphs that turn logits into laws, against the oracle: numbers instead of decisions."""

import math
from collections.abc import Callable, Iterator, Mapping

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
    """The kept tokens, and what they are given. At a filter's edge rounding may keep or drop a few more."""
    feeds = cases.shaping(rng, shape)
    found = graphs.run("law-filtered", feeds)["p"]
    for b, r in np.ndindex(*found.shape[:2]):
        logits, p = feeds["logits"][b, r].tolist(), found[b, r]
        at = _widened(logits, *(float(feeds[name][b]) for name in ("temperature", "top_k", "top_p", "min_p")))
        expected = at(0.0)
        if _kept(expected, p):
            yield _laws(expected, p)
        else:
            counts = (sum(x > 0 for x in expected), int(np.count_nonzero(p)))
            yield Compared(f"keeps {counts[0]}", f"keeps {counts[1]}", _edge(at, p))


def _widened(
    logits: list[float], temperature: float, top_k: float, top_p: float, min_p: float
) -> Callable[[float], Law]:
    """The oracle's law where top-p and min-p keep more by an edge (0: as they are)."""

    def at(edge: float) -> Law:
        least = min(1.0, min_p * (1 - edge))
        return filtered_law(logits, temperature, top_k=int(top_k), top_p=top_p + edge, min_p=least)

    return at


def _sum_bound(found: Array) -> float:
    """What rounding does to a law: that of each probability, and that of the prefix sums over what is kept."""
    return LAW_BOUND + UNIT * int(np.count_nonzero(found))


def _edge(at: Callable[[float], Law], found: Array) -> Margin:
    """By how much the filters must widen and narrow so that what the graph keeps lies between."""
    bound, kept = _sum_bound(found), found > 0
    edge = UNIT
    while edge < bound:
        edge = min(4 * edge, bound)
        fewer, more = np.asarray(at(-edge)) > SMALLEST_FLOAT, np.asarray(at(edge)) > 0
        if np.all(fewer <= kept) and np.all(kept <= more):
            return Margin(edge, bound)
    return Margin(math.inf, bound)


def _kept(expected: Law, found: Array) -> bool:
    """Whether the same tokens are kept, leaving out those that float32 cannot hold."""
    wanted = np.asarray(expected)
    clear = (wanted == 0) | (wanted > SMALLEST_FLOAT)
    return bool(np.array_equal((wanted > 0)[clear], (found > 0)[clear]))


def _laws(expected: Law, found: Array) -> Compared:
    """The largest relative error of a probability; a zero must be one."""
    wanted, given = np.asarray(expected), found.astype(np.float64)
    errors = np.abs(given - wanted) / np.maximum(wanted, SMALLEST_FLOAT)
    bound = _sum_bound(found)
    if np.all(errors <= bound):  # a NaN is not
        return Compared("a law", "the same", None)
    worst = float(np.nanmax(errors)) if not np.isnan(errors).all() else math.nan
    return Compared("a law", f"off by {worst:.1e}", Margin(math.inf, bound))


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
