"""The laws of rows whose filters keep more than the candidates that are looked at first.

    N             such rows
    weight        of a token: its probability before the filters; where k tokens are counted, 1
    budget        a filter ends where the weight of larger logits reaches it
    band          the 512 likeliest tokens below a threshold

A sample tells about where a filter ends, one look at whole rows corrects that, and the band there decides. What the
sample tells is a guess that costs time if wrong, and nothing else: a row that ends neither inside its band nor among
the equals that the band ends with is handed back, for a larger sample, and in the end for bisection.

Probabilities stand in for logits where equals need not be told apart: no softmax falls where a logit rises.
"""

from onnxscript import BOOL, FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import FINE_LENGTH, B, R, V, cut_finely, formula
from forerun_export.sampling.candidates import M, kept_candidates, largest, top_k_edge
from forerun_export.sampling.equals import kth_among_equals, laws_among_equals

INFINITY = float("inf")
N = "N"
SAMPLE = "V/spacing^2"
BAND = 512
HALF_BAND = 256.0
FEW = 128.0  # tokens of a sample, among which the weight is interpolated
LOOKS = 16
JUST_ABOVE = 1.000001  # times a probability: more than those that round to the same
LEAST = 1e-45  # of the probabilities above 0


@formula
def sampled(rows: FLOAT[N, V], spacing: INT64[1], missing: INT64[1]) -> FLOAT[N, SAMPLE]:
    """Of one block of 64 in so many, the middle one, the middle one in so many parts: few lines of a cache."""
    blocks = op.Squeeze(cut_finely(op.Unsqueeze(rows, [0]), missing, 0.0), [0])
    width = FINE_LENGTH / spacing
    start = (FINE_LENGTH - width) / 2
    of_blocks = op.Slice(blocks, spacing / 2, op.Shape(blocks, start=1, end=2), [1], spacing)
    return op.Reshape(op.Slice(of_blocks, start, start + width, [2]), [0, -1])


@formula
def bracket(
    sample: FLOAT[N, SAMPLE], weights: FLOAT[N, SAMPLE], budget: FLOAT[N, 1], high: FLOAT[N, 1], unit: FLOAT[N, 1]
) -> tuple[FLOAT[N, 2], FLOAT[N, 2], BOOL[N, 1]]:
    """A probability above the edge and one below it, few tokens apart; the weight above each; whether they are many.

    By bisection between `high` and the smallest, of a row until its tokens are few enough. No token in between weighs
    less than the lower end or, where tokens are counted, than `unit`.
    """
    ends = op.Concat(high, op.Max(op.ReduceMin(sample, [1]), 1e-30), axis=1)
    sums = op.Concat(high * 0.0, op.ReduceSum(weights, [1]), axis=1)
    many = sums[:, 1:] > FEW * op.Max(ends[:, 1:], unit)
    for _look in range(LOOKS):
        middle = op.Sqrt(ends[:, :1]) * op.Sqrt(ends[:, 1:])
        weight = op.ReduceSum(op.Cast(sample > middle, to=FLOAT.dtype) * weights, [1])
        within = weight < budget
        moves = op.And(many, op.Concat(within, op.Not(within), axis=1))
        ends = op.Where(moves, middle, ends)
        sums = op.Where(moves, weight, sums)
        many = sums[:, 1:] - sums[:, :1] > FEW * op.Max(ends[:, 1:], unit)
        all_few = op.ReduceMax(op.Cast(many, to=INT64.dtype), keepdims=0) == 0
        if all_few:
            break
    return ends, sums, many


@formula
def first_guess(
    sample: FLOAT[N, SAMPLE], weights: FLOAT[N, SAMPLE], budget: FLOAT[N, 1], high: FLOAT[N, 1], unit: FLOAT[N, 1]
) -> tuple[FLOAT[N, 1], FLOAT[N, 1]]:
    """A probability at about which a sample's weight reaches the budget, and how it changes there with the weight.

    Just above the edge, and not to be moved, if there are many equals.
    """
    ends, sums, many = bracket(sample, weights, budget, high, unit)
    slope = op.Where(many, 0.0, (ends[:, 1:] - ends[:, :1]) / (sums[:, 1:] - sums[:, :1]))
    return ends[:, :1] + op.Where(many, 0.0, slope * (budget - sums[:, :1])), slope


@formula
def better_guess(
    first: FLOAT[N, 1], slope: FLOAT[N, 1], missed: FLOAT[N, 1], unit: FLOAT[N, 1], spacing: INT64[1]
) -> FLOAT[N, 1]:
    """The probability half a band above the edge, if the first guess missed so much of the sample's weight."""
    all_of_sample = op.Cast(spacing * spacing, to=FLOAT.dtype)
    return first + slope * (missed - HALF_BAND * op.Max(first, unit) / all_of_sample)


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
    p: FLOAT[N, V], sample: FLOAT[N, SAMPLE], k: FLOAT[N, 1], weight: FLOAT[N, M], spacing: INT64[1]
) -> FLOAT[N, 1]:
    """A probability about half a band above the k-th largest: a guess; infinity where that is among the candidates."""
    last = weight[:, -1:]
    high, one = last * JUST_ABOVE, last * 0.0 + 1.0
    candidates = op.Cast(op.Shape(weight, start=1), to=FLOAT.dtype)
    behind = op.Cast(op.Shape(p, start=1), to=FLOAT.dtype) - candidates
    counted = op.Cast(sample <= last, to=FLOAT.dtype)
    scale = op.ReduceSum(counted, [1]) / behind
    first, slope = first_guess(sample, counted, (k - candidates) * scale, high, one)
    missed = (k - op.ReduceSum(op.Cast(p > first, to=FLOAT.dtype), [1])) * scale
    guess = op.Max(op.Min(better_guess(first, slope, missed, one, spacing), high), LEAST)
    return op.Where(k > candidates, guess, op.Where(k > 0.0, INFINITY, 0.0))


@formula
def above_nucleus(
    p: FLOAT[N, V], sample: FLOAT[N, SAMPLE], nucleus: FLOAT[N, 1], weight: FLOAT[N, M], spacing: INT64[1]
) -> FLOAT[N, 1]:
    """A probability about half a band above the end of a nucleus with this weight: a guess; infinity as above."""
    last = weight[:, -1:]
    high, nothing = last * JUST_ABOVE, last * 0.0
    before = op.ReduceSum(op.Where(weight > last, weight, 0.0), [1])
    weights = op.Cast(sample <= last, to=FLOAT.dtype) * sample
    scale = op.ReduceSum(weights, [1]) / (1.0 - before)
    first, slope = first_guess(sample, weights, (nucleus - before) * scale, high, nothing)
    missed = (nucleus - op.ReduceSum(op.Cast(p > first, to=FLOAT.dtype) * p, [1])) * scale
    guess = op.Min(better_guess(first, slope, missed, nothing, spacing), high)
    return op.Where(nucleus > before, guess, INFINITY)


@formula
def law_by_band(
    p: FLOAT[N, V],
    logits: FLOAT[B, R, V],
    row: INT64[N, 2],
    above: FLOAT[N, V],
    logit: FLOAT[1, N, M],
    token: INT64[1, N, M],
    weight: FLOAT[1, N, M],
    kth: FLOAT[1, N, 1],
    nucleus: FLOAT[N, 1],
    least_weight: FLOAT[N, 1],
    missing: INT64[1],
) -> tuple[FLOAT[N, V], BOOL[N]]:
    """The law of all that is above a band and of what the filters keep in it, or among the equals that it ends with;
    and whether the filters end there."""
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
    weights = op.ScatterElements(above, place, op.GatherElements(above, place, axis=1) + kept, axis=1)
    in_band = op.Squeeze(found, [0, 2])
    if op.ReduceMin(op.Cast(in_band, to=INT64.dtype), keepdims=0) > 0:
        law = weights / all_kept
        found = op.Identity(in_band)
    else:
        other = op.Transpose(op.NonZero(op.Not(in_band)))
        other_laws, other_found = laws_among_equals(
            op.GatherND(p, other),
            op.GatherND(logits, op.GatherND(row, other)),
            op.GatherND(op.Squeeze(logit[:, :, -1:], [0]), other),
            op.GatherND(op.Squeeze(kth, [0]), other),
            op.GatherND(nucleus, other),
            op.GatherND(least_weight, other),
            missing,
        )
        law = op.ScatterND(weights / all_kept, other, other_laws)
        found = op.ScatterND(in_band, other, other_found)
    return law, found


@formula
def kth_logit(
    p: FLOAT[N, V],
    logits: FLOAT[B, R, V],
    row: INT64[N, 2],
    k: FLOAT[N, 1],
    above: FLOAT[N, V],
    count: FLOAT[N, 1],
    logit: FLOAT[1, N, M],
    weight: FLOAT[1, N, M],
) -> tuple[FLOAT[1, N, 1], FLOAT[1, N, 1], BOOL[1, N, 1]]:
    """The k-th largest logit and the weight of all that are no less, if it is in this band or among the equals that the
    band ends with; and whether it is. `above` and its `count` are what is before the band."""
    in_band, total_in_band, is_in_band = top_k_edge(
        logit, weight, op.Unsqueeze(k, [0]), op.Unsqueeze(count, [0]), op.Unsqueeze(op.ReduceSum(above, [1]), [0])
    )
    if op.ReduceMin(op.Cast(is_in_band, to=INT64.dtype), keepdims=0) > 0:
        kth, total, found = op.Identity(in_band), op.Identity(total_in_band), op.Identity(is_in_band)
    else:
        tied = logit[:, :, -1:]
        tied_total, is_tied = kth_among_equals(
            p, op.GatherND(logits, row), k, op.Squeeze(tied, [0]), op.Squeeze(weight[:, :, -1:], [0])
        )
        kth = op.Where(is_in_band, in_band, tied)
        total = op.Where(is_in_band, total_in_band, op.Unsqueeze(tied_total, [0]))
        found = op.Or(is_in_band, op.Unsqueeze(is_tied, [0]))
    return kth, total, found


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
    spacing: INT64[1],
) -> tuple[FLOAT[N, V], BOOL[N]]:
    """The laws after the filters, which keep more than the candidates with these weights; and whether they are right.

    `spacing` as in `sampled`.
    """
    sample = sampled(p, spacing, missing)
    k = op.Cast(top_k, to=FLOAT.dtype)
    if op.ReduceMax(k, keepdims=0) > 0.0:
        threshold_k = above_kth(p, sample, k, weight, spacing)
        above_k, count, logit_k, token_k, weight_k = split(p, threshold_k, logits, row, missing)
        kth, total, found_k = kth_logit(p, logits, row, k, above_k, count, logit_k, weight_k)
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
            guess = above_nucleus(p, sample, nucleus, weight, spacing)
        else:
            guess = k + 0.0
        # What top-k and min-p rule out is never above, so min-p alone needs no search.
        threshold = op.Max(op.Where(has_nucleus, guess, 0.0), threshold_k, least_weight)
        above, _count, logit, token, weight_in_band = split(p, threshold, logits, row, missing)
    else:
        above, logit, token, weight_in_band = above_k + 0.0, logit_k + 0.0, token_k + 0, weight_k + 0.0

    nucleus = op.Where(has_nucleus, nucleus, INFINITY)
    law, found = law_by_band(p, logits, row, above, logit, token, weight_in_band, kth, nucleus, least_weight, missing)
    return law, op.And(found, op.Squeeze(found_k, [0, 2]))
