"""The laws of rows whose filters keep more than the candidates that are looked at first.

    N             such rows
    weight        of a token: its probability before the filters; where k tokens are counted, 1
    budget        a filter ends where the weight of larger logits reaches it
    band          the 512 likeliest tokens below a threshold

A sample tells about where a filter ends, one look at whole rows corrects that, and the band there decides. What the
sample tells is a guess that costs time if wrong, and nothing else: a row that does not end inside its band is handed
back, for a larger sample, and in the end (more equal logits than a band is long) for bisection.

Probabilities stand in for logits where equals need not be told apart: no softmax falls where a logit rises.
"""

from onnxscript import BOOL, FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import B, R, V, formula
from forerun_export.sampling.candidates import M, kept_candidates, largest, top_k_edge

INFINITY = float("inf")
N = "N"
BAND = 512
HALF_BAND = 256.0
FEW = 128.0  # tokens of a sample, among which the weight is interpolated
LOOKS = 16
LEAST = 1e-45  # of the probabilities above 0


@formula
def bracket(
    p: FLOAT[N, V], weights: FLOAT[N, V], budget: FLOAT[N, 1], high: FLOAT[N, 1]
) -> tuple[FLOAT[N, 2], FLOAT[N, 2], FLOAT[N, 2]]:
    """A probability above the edge and one below it, few tokens apart; the weight and the number of tokens above each.

    By bisection between `high` and the smallest, of a row until its tokens are few enough.
    """
    ends = op.Concat(high, op.Max(op.ReduceMin(p, [1]), 1e-30), axis=1)
    sums = op.Concat(high * 0.0, op.ReduceSum(weights, [1]), axis=1)
    counts = op.Concat(high * 0.0, op.ReduceSum(op.Cast(weights > 0.0, to=FLOAT.dtype), [1]), axis=1)
    for _look in range(LOOKS):
        middle = op.Sqrt(ends[:, :1]) * op.Sqrt(ends[:, 1:])
        larger = op.Cast(p > middle, to=FLOAT.dtype)
        weight = op.ReduceSum(larger * weights, [1])
        within = weight < budget
        moves = op.And(counts[:, 1:] - counts[:, :1] > FEW, op.Concat(within, op.Not(within), axis=1))
        ends = op.Where(moves, middle, ends)
        sums = op.Where(moves, weight, sums)
        counts = op.Where(moves, op.ReduceSum(larger, [1]), counts)
        all_few = op.ReduceMax(counts[:, 1:] - counts[:, :1], keepdims=0) <= FEW
        if all_few:
            break
    return ends, sums, counts


@formula
def sampled(rows: FLOAT[N, V], stride: INT64[1]) -> FLOAT[N, V]:
    """One token of so many, the middle one: vocabularies tend to be in the order of frequency."""
    return op.Slice(rows, stride / 2, op.Shape(rows, start=1), [1], stride)


@formula
def first_guess(
    sample: FLOAT[N, V], weights: FLOAT[N, V], budget: FLOAT[N, 1], high: FLOAT[N, 1]
) -> tuple[FLOAT[N, 1], FLOAT[N, 1], FLOAT[N, 1]]:
    """A probability at about which a sample's weight reaches the budget; how it changes there with the weight, and how
    many tokens of the sample weigh 1."""
    ends, sums, counts = bracket(sample, weights, budget, high)
    weight_between = sums[:, 1:] - sums[:, :1]
    slope = (ends[:, 1:] - ends[:, :1]) / weight_between
    return ends[:, :1] + slope * (budget - sums[:, :1]), slope, (counts[:, 1:] - counts[:, :1]) / weight_between


@formula
def better_guess(
    first: FLOAT[N, 1], slope: FLOAT[N, 1], density: FLOAT[N, 1], missed: FLOAT[N, 1], stride: INT64[1]
) -> FLOAT[N, 1]:
    """The probability half a band above the edge, if the first guess missed so much of the sample's weight."""
    return first + slope * (missed - HALF_BAND / (density * op.Cast(stride, to=FLOAT.dtype)))


@formula
def split(
    p: FLOAT[N, V], threshold: FLOAT[N, 1], logits: FLOAT[B, R, V], row: INT64[N, 2], missing: INT64[1]
) -> tuple[FLOAT[N, V], FLOAT[N, 1], FLOAT[1, N, M], INT64[1, N, M], FLOAT[1, N, M]]:
    """What is not below the threshold, 0 elsewhere; how many these are; and the band in the order of its logits: these,
    tokens, weights.

    `row` says which of the logits are a row's; `missing` as in `largest`. Without enough tokens below the threshold the
    band ends with others, without logit and weight.
    """
    is_above = op.Cast(p >= threshold, to=FLOAT.dtype)
    count = op.ReduceSum(is_above, [1])
    above = is_above * p
    weight, token = largest(op.Unsqueeze(p - above, [0]), missing, op.Constant(value_ints=[BAND]))
    length = op.Shape(token, start=2)
    rows = op.Expand(op.Unsqueeze(row, [0, 2]), op.Concat([1, 1], length, [1], axis=0))
    logit = op.GatherND(logits, op.Concat(rows, op.Unsqueeze(token, [3]), axis=3))
    logit, order = op.TopK(op.Where(weight > 0.0, logit, -INFINITY), length)
    return above, count, logit, op.GatherElements(token, order, axis=2), op.GatherElements(weight, order, axis=2)


@formula
def above_kth(
    p: FLOAT[N, V], sample: FLOAT[N, V], k: FLOAT[N, 1], weight: FLOAT[N, M], stride: INT64[1]
) -> FLOAT[N, 1]:
    """A probability about half a band above the k-th largest: a guess; infinity where that is among the candidates."""
    last = weight[:, -1:]
    candidates = op.Cast(op.Shape(weight, start=1), to=FLOAT.dtype)
    behind = op.Cast(op.Shape(p, start=1), to=FLOAT.dtype) - candidates
    counted = op.Cast(sample <= last, to=FLOAT.dtype)
    scale = op.ReduceSum(counted, [1]) / behind
    first, slope, density = first_guess(sample, counted, (k - candidates) * scale, last)
    missed = (k - op.ReduceSum(op.Cast(p > first, to=FLOAT.dtype), [1])) * scale
    guess = better_guess(first, slope, density, missed, stride)
    return op.Where(k > candidates, op.Max(op.Min(guess, last), LEAST), op.Where(k > 0.0, INFINITY, 0.0))


@formula
def above_nucleus(
    p: FLOAT[N, V], sample: FLOAT[N, V], nucleus: FLOAT[N, 1], weight: FLOAT[N, M], stride: INT64[1]
) -> FLOAT[N, 1]:
    """A probability about half a band above the end of a nucleus with this weight: a guess; infinity as above."""
    last = weight[:, -1:]
    before = op.ReduceSum(op.Where(weight > last, weight, 0.0), [1])
    weights = op.Cast(sample <= last, to=FLOAT.dtype) * sample
    scale = op.ReduceSum(weights, [1]) / (1.0 - before)
    first, slope, density = first_guess(sample, weights, (nucleus - before) * scale, last)
    missed = (nucleus - op.ReduceSum(op.Cast(p > first, to=FLOAT.dtype) * p, [1])) * scale
    guess = better_guess(first, slope, density, missed, stride)
    return op.Where(nucleus > before, op.Min(guess, last), INFINITY)


@formula
def law_by_band(
    above: FLOAT[N, V],
    logit: FLOAT[1, N, M],
    token: INT64[1, N, M],
    weight: FLOAT[1, N, M],
    kth: FLOAT[1, N, 1],
    nucleus: FLOAT[N, 1],
    least_weight: FLOAT[N, 1],
) -> tuple[FLOAT[N, V], BOOL[N]]:
    """The law of all that is above a band and of what the filters keep in it; and whether they end there."""
    before = op.ReduceSum(above, [1])
    kept, all_kept, found = kept_candidates(
        logit,
        token,
        weight,
        op.Unsqueeze(before, [0]),
        kth,
        op.Unsqueeze(nucleus, [0]),
        op.Unsqueeze(least_weight, [0]),
    )
    found = op.And(found, op.Unsqueeze(before < nucleus, [0]))
    place, kept, all_kept = op.Squeeze(token, [0]), op.Squeeze(kept, [0]), op.Squeeze(all_kept, [0])
    in_band = op.GatherElements(above, place, axis=1) + kept
    law = op.ScatterElements(above, place, in_band, axis=1) / all_kept
    return law, op.Squeeze(op.Squeeze(found, [0]), [1])


@formula
def wide_laws(
    p: FLOAT[N, V],
    logits: FLOAT[B, R, V],
    row: INT64[N, 2],
    top_k: INT64[N, 1],
    top_p: FLOAT[N, 1],
    min_p: FLOAT[N, 1],
    weight: FLOAT[N, M],
    missing: INT64[1],
    stride: INT64[1],
) -> tuple[FLOAT[N, V], BOOL[N]]:
    """The laws after the filters, which keep more than the candidates with these weights; and whether they are right.

    One token of `stride` is in the sample.
    """
    sample = sampled(p, stride)
    k = op.Cast(top_k, to=FLOAT.dtype)
    if op.ReduceMax(k, keepdims=0) > 0.0:
        threshold_k = above_kth(p, sample, k, weight, stride)
        above_k, count, logit_k, token_k, weight_k = split(p, threshold_k, logits, row, missing)
        kth, total, found_k = top_k_edge(
            logit_k,
            weight_k,
            op.Unsqueeze(k, [0]),
            op.Unsqueeze(count, [0]),
            op.Unsqueeze(op.ReduceSum(above_k, [1]), [0]),
        )
    else:
        everything = op.Unsqueeze(k, [0])
        threshold_k = k + 0.0
        above_k, logit_k, token_k, weight_k = k + 0.0, everything, op.Unsqueeze(top_k, [0]), everything + 0.0
        kth, total, found_k = everything - INFINITY, everything + 1.0, everything == 0.0

    has_nucleus = top_p < 1.0
    nucleus = op.Max(top_p, 1e-30) * op.Squeeze(total, [0])
    least_weight = min_p * weight[:, :1]
    ends_later = op.Or(op.Or(has_nucleus, min_p > 0.0), k == 0.0)
    if op.ReduceMax(op.Cast(ends_later, to=INT64.dtype), keepdims=0) > 0:
        if op.ReduceMax(op.Cast(has_nucleus, to=INT64.dtype), keepdims=0) > 0:
            guess = above_nucleus(p, sample, nucleus, weight, stride)
        else:
            guess = k + 0.0
        # What top-k and min-p rule out is never above, so min-p alone needs no search.
        threshold = op.Max(op.Where(has_nucleus, guess, 0.0), threshold_k, least_weight)
        above, _count, logit, token, weight_in_band = split(p, threshold, logits, row, missing)
    else:
        above, logit, token, weight_in_band = above_k + 0.0, logit_k + 0.0, token_k + 0, weight_k + 0.0

    nucleus = op.Where(has_nucleus, nucleus, INFINITY)
    law, found = law_by_band(above, logit, token, weight_in_band, kth, nucleus, least_weight)
    return law, op.And(found, op.Squeeze(op.Squeeze(found_k, [0]), [1]))


@formula
def edge(
    weights: FLOAT[N, V], logits: FLOAT[N, V], budget: FLOAT[N, 1], lowest: FLOAT[N, 1]
) -> tuple[FLOAT[N, 1], FLOAT[N, 1]]:
    """Where the weight of larger logits reaches the budget, as (low, high).

    More than low is the first logit to be kept at the edge, or several equal ones; high is at most this. All above
    `lowest` are kept if their weight is within the budget. By bisection: one look at the rows for each halving.
    """
    above = op.Cast(logits > lowest, to=FLOAT.dtype)
    searching = op.ReduceSum(above * weights, [1]) >= budget
    ends = op.Concat(lowest, op.Where(searching, op.ReduceMax(logits, [1]), lowest), axis=1)
    count = op.ReduceSum(above, [1])
    counts = op.Concat(count, count * 0.0, axis=1)
    any_searching = op.ReduceMax(op.Cast(searching, to=INT64.dtype), keepdims=0) > 0
    while any_searching:
        low, high = ends[:, :1], ends[:, 1:]
        middle = low + (high - low) * 0.5
        larger = op.Cast(logits > middle, to=FLOAT.dtype)
        within = op.ReduceSum(larger * weights, [1]) < budget
        moves = op.Concat(op.Not(within), within, axis=1)
        ends = op.Where(moves, middle, ends)
        counts = op.Where(moves, op.ReduceSum(larger, [1]), counts)
        several = counts[:, :1] - counts[:, 1:] > 1.0
        searching = op.And(op.And(middle > low, middle < high), several)
        any_searching = op.ReduceMax(op.Cast(searching, to=INT64.dtype), keepdims=0) > 0
    return ends[:, :1], ends[:, 1:]


@formula
def bisected_laws(
    p: FLOAT[N, V],
    logits: FLOAT[N, V],
    temperature: FLOAT[N, 1],
    top_k: INT64[N, 1],
    top_p: FLOAT[N, 1],
    min_p: FLOAT[N, 1],
) -> FLOAT[N, V]:
    """The laws after the filters, whatever they keep."""
    # Below this, probabilities are 0 in float32.
    lowest = op.ReduceMax(logits, [1]) - temperature * 128.0
    k = op.Where(top_k > 0, op.Cast(top_k, to=FLOAT.dtype), INFINITY)
    low_k, _high_k = edge(op.Expand(1.0, op.Shape(p)), logits, k, lowest)
    weights = p * op.Cast(logits > low_k, to=FLOAT.dtype)

    nucleus = op.Where(top_p < 1.0, op.Max(top_p, 1e-30) * op.ReduceSum(weights, [1]), INFINITY)
    low, high = edge(weights, logits, nucleus, low_k)
    larger = logits > high
    equals = op.Cast(op.And(logits > low, op.Not(larger)), to=FLOAT.dtype)
    before_equals = op.ReduceSum(weights * op.Cast(larger, to=FLOAT.dtype), [1])
    before = before_equals + op.CumSum(equals * weights, 1, exclusive=1, reverse=1)
    in_nucleus = op.Or(larger, op.And(equals > 0.0, before < nucleus))

    chosen = op.And(in_nucleus, weights >= min_p * op.ReduceMax(weights, [1]))
    kept = weights * op.Cast(chosen, to=FLOAT.dtype)
    return kept / op.ReduceSum(kept, [1])
