"""The controls of a request, from raw logits to the law that tokens are drawn from.

    E             edited tokens a row; padding repeats one of them with the same numbers
    M             candidates a row: the largest logits, in descending order
    weight        a candidate's probability before the filters

A row's outputs depend, to the bit, on that row's inputs alone.
"""

from onnxscript import BOOL, FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import (
    FINE_LENGTH,
    B,
    R,
    V,
    cut_finely,
    formula,
    law,
    logarithm,
    probability,
)

INFINITY = float("inf")
E, M, N = "E", "M", "N"
CANDIDATES = 256  # nuclei of peaked laws are smaller, and are found among these
ALTERNATIVES = 20


@formula
def edit(
    logits: FLOAT[B, R, V],
    edit_tokens: INT64[B, R, E],
    edit_bias: FLOAT[B, R, E],
    edit_penalty: FLOAT[B, R, E],
    edit_shift: FLOAT[B, R, E],
    only: BOOL[B, R],
) -> FLOAT[B, R, V]:
    """Change the logits of listed tokens; where `only`, rule out all others.

    l + bias, then over the repetition penalty if positive, times it if not (Keskar et al. 1909.05858), minus shift,
    which is presence + frequency * count, or infinity for a ban.
    """
    biased = op.GatherElements(logits, edit_tokens, axis=2) + edit_bias
    penalised = op.Where(biased > 0.0, biased / edit_penalty, biased * edit_penalty)
    others = op.Min(logits, op.Unsqueeze(op.Where(only, -INFINITY, INFINITY), [2]))
    edited = op.ScatterElements(others, edit_tokens, penalised - edit_shift, axis=2)
    return edited  # noqa: RET504 (the name of the graph's output)


@formula
def plain_law(logits: FLOAT[B, R, V], temperature: FLOAT[B]) -> FLOAT[B, R, V]:
    """p without filters."""
    p = law(logits, temperature)
    return p  # noqa: RET504 (the name of the graph's output)


@formula
def largest(logits: FLOAT[B, R, V], count: INT64[1]) -> tuple[FLOAT[B, R, M], INT64[B, R, M]]:
    """The `count` largest logits of each row, in descending order, and their tokens.

    They lie in the `count` blocks with the largest maxima; looking there first makes the search several times faster.
    Only a logit of -infinity may come with a number past the vocabulary, from the filling of the last block.
    """
    size = op.Shape(logits, start=2)
    blocks = cut_finely(logits, -INFINITY)
    maxima = op.ReduceMax(blocks, [3], keepdims=0)
    _, block = op.TopK(maxima, op.Min(count, op.Shape(maxima, start=2)))
    inside = op.Reshape(op.GatherND(blocks, op.Unsqueeze(block, [3]), batch_dims=2), [0, 0, -1])
    logit, place = op.TopK(inside, op.Min(count, size))
    start = op.GatherElements(block, place / FINE_LENGTH, axis=2) * FINE_LENGTH
    return logit, start + op.Mod(place, FINE_LENGTH)


@formula
def last_of_equals(logit: FLOAT[B, R, M], token: INT64[B, R, M], chosen: BOOL[B, R, M]) -> BOOL[B, R, M]:
    """As many candidates as chosen, but of those equal to the last one the highest tokens.

    Hugging Face removes in ascending order, lower tokens first, so a nucleus that ends among equals keeps these.
    """
    least = op.ReduceMin(op.Where(chosen, logit, INFINITY), [2], keepdims=1)
    ties = logit == least
    kept_ties = op.ReduceSum(op.Cast(op.And(chosen, ties), to=INT64.dtype), [2], keepdims=1)
    tied, _ = op.TopK(op.Where(ties, op.Cast(token, to=FLOAT.dtype), -1.0), op.Shape(logit, start=2))
    rank = op.Range(0, op.Squeeze(op.Shape(logit, start=2), [0]), 1)
    lowest = op.ReduceMin(op.Where(rank < kept_ties, tied, INFINITY), [2], keepdims=1)
    return op.Or(logit > least, op.And(ties, op.Cast(token, to=FLOAT.dtype) >= lowest))


@formula
def filtered_candidates(
    logit: FLOAT[B, R, M],
    token: INT64[B, R, M],
    weight: FLOAT[B, R, M],
    top_k: INT64[B],
    top_p: FLOAT[B],
    min_p: FLOAT[B],
) -> tuple[FLOAT[B, R, M], BOOL[B, R]]:
    """The candidates' law after the filters, and whether it is that of the row: none beyond them is kept.

    Each filter keeps a prefix of the descending order: top-k what is no less than the k-th, top-p what has less than
    top_p of the remaining weight before it, min-p what has min_p of the first one's weight.
    """
    k, p_least, p_nucleus = (
        op.Unsqueeze(top_k, [1, 2]),
        op.Unsqueeze(min_p, [1, 2]),
        op.Unsqueeze(op.Where(top_p < 1.0, op.Max(top_p, 1e-30), INFINITY), [1, 2]),
    )
    rank = op.Range(0, op.Squeeze(op.Shape(logit, start=2), [0]), 1)
    kth = op.ReduceMin(op.Where(op.Or(k == 0, rank >= k), INFINITY, logit), [2], keepdims=1)
    kth = op.Where(k == 0, -INFINITY, kth)
    among_k = op.Where(logit >= kth, weight, 0.0)
    up_to, before = op.CumSum(among_k, 2), op.CumSum(among_k, 2, exclusive=1)
    total = op.Where(k == 0, 1.0, up_to[:, :, -1:])
    in_nucleus = op.And(logit >= kth, before < p_nucleus * total)
    chosen = op.And(in_nucleus, weight >= p_least * weight[:, :, :1])

    least = op.ReduceMin(op.Where(chosen, logit, INFINITY), [2], keepdims=1)
    kept = logit >= least
    if op.ReduceMax(op.Cast(op.And(kept, op.Not(chosen)), to=INT64.dtype), keepdims=0) > 0:
        keep = last_of_equals(logit, token, chosen)
    else:
        keep = op.Identity(kept)
    kept_weight = op.ReduceMax(op.Where(chosen, up_to, 0.0), [2], keepdims=1)
    law_of_kept = weight * op.Cast(keep, to=FLOAT.dtype) / kept_weight

    last, last_weight = logit[:, :, -1:], weight[:, :, -1:]
    goes_on = op.And(last_weight > 0.0, op.Or(last >= least, op.And(k > 0, last >= kth)))
    return law_of_kept, op.Squeeze(op.Not(goes_on), [2])


@formula
def candidates(
    logits: FLOAT[B, R, V],
    unfiltered: FLOAT[B, R, V],
    filters: BOOL[B],
    top_k: INT64[B],
    top_p: FLOAT[B],
    min_p: FLOAT[B],
) -> tuple[INT64[B, R, M], FLOAT[B, R, M], BOOL[B, R]]:
    """The likeliest tokens, what the law gives them, and whether a filtered row keeps more than these."""
    logit, token = largest(logits, op.Constant(value_ints=[CANDIDATES]))
    size = op.Shape(logits, start=2)
    filling = token >= size
    token = op.Where(filling, op.Min(token[:, :, :1], size - 1), token)
    weight = op.Where(filling, 0.0, op.GatherElements(unfiltered, token, axis=2))
    law_of_kept, enough = filtered_candidates(logit, token, weight, top_k, top_p, min_p)

    p = op.Where(op.Unsqueeze(filters, [1, 2]), law_of_kept, weight)
    p = op.Where(filling, p[:, :, :1], p)
    return token, p, op.And(op.Unsqueeze(filters, [1]), op.Not(enough))


@formula
def edge(
    weights: FLOAT[1, V], logits: FLOAT[1, V], budget: FLOAT[1, 1], lowest: FLOAT[1, 1]
) -> tuple[FLOAT[1, 1], FLOAT[1, 1]]:
    """Where the weight of larger logits reaches the budget, as (low, high).

    More than low is the first logit to be kept at the edge, or several equal ones; high is at most this. All above
    `lowest` are kept if their weight is within the budget. By bisection: one look at the row for each halving.
    """
    largest_logit = op.ReduceMax(logits, [1])
    above = op.Cast(logits > lowest, to=FLOAT.dtype)
    exceeds = op.ReduceSum(above * weights, [1]) >= budget
    low = op.Identity(lowest)
    high = op.Where(exceeds, largest_logit, lowest)
    above_low = op.ReduceSum(above, [1])
    above_high = above_low * 0.0
    searching = op.Squeeze(exceeds)
    while searching:
        middle = low + (high - low) * 0.5
        larger = op.Cast(logits > middle, to=FLOAT.dtype)
        count = op.ReduceSum(larger, [1])
        within = op.ReduceSum(larger * weights, [1]) < budget
        between = op.And(middle > low, middle < high)
        low = op.Where(within, low, middle)
        high = op.Where(within, middle, high)
        above_low = op.Where(within, above_low, count)
        above_high = op.Where(within, count, above_high)
        searching = op.Squeeze(op.And(between, above_low - above_high > 1.0))
    return low, high


@formula
def filtered_row(
    logits: FLOAT[1, V],
    unfiltered: FLOAT[1, V],
    temperature: FLOAT[1, 1],
    top_k: INT64[1, 1],
    top_p: FLOAT[1, 1],
    min_p: FLOAT[1, 1],
) -> FLOAT[1, V]:
    """The law of one row after the filters, whatever they keep."""
    # Below this, probabilities are 0 in float32.
    lowest = op.ReduceMax(logits, [1]) - temperature * 128.0
    k = op.Where(top_k > 0, op.Cast(top_k, to=FLOAT.dtype), INFINITY)
    low_k, _ = edge(unfiltered * 0.0 + 1.0, logits, k, lowest)
    weights = unfiltered * op.Cast(logits > low_k, to=FLOAT.dtype)

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


@formula
def law_filtered(
    logits: FLOAT[B, R, V],
    temperature: FLOAT[B],
    top_k: INT64[B],
    top_p: FLOAT[B],
    min_p: FLOAT[B],
) -> FLOAT[B, R, V]:
    """p after top-k, top-p and min-p, in this order; 0, 1 and 0 switch them off. At T = 0 they change nothing.

    Holtzman et al. 1904.09751 (top-p), Nguyen et al. 2407.01082 (min-p). Exact: a row that keeps more than the
    candidates is searched whole.
    """
    unfiltered = law(logits, temperature)
    filters = op.And(temperature > 0.0, op.Or(op.Or(top_k > 0, top_p < 1.0), min_p > 0.0))
    token, p_token, is_wide = candidates(logits, unfiltered, filters, top_k, top_p, min_p)
    others = unfiltered * op.Cast(op.Not(op.Unsqueeze(filters, [1, 2])), to=FLOAT.dtype)
    wide = op.Cast(op.Reshape(is_wide, [-1]), to=INT64.dtype)
    any_wide = op.ReduceMax(wide, keepdims=0) > 0
    if any_wide:
        rows_a_request = op.Squeeze(op.Shape(logits, start=1, end=2), [0])
        flat_logits = op.Flatten(logits, axis=2)
        flat_unfiltered = op.Flatten(unfiltered, axis=2)
        flat = op.Flatten(op.ScatterElements(others, token, p_token, axis=2), axis=2)
        go_on = any_wide
        while go_on:
            row = op.ArgMax(wide, axis=0, keepdims=1)
            request = row / rows_a_request
            found = filtered_row(
                op.Gather(flat_logits, row),
                op.Gather(flat_unfiltered, row),
                op.Unsqueeze(op.Gather(temperature, request), [1]),
                op.Unsqueeze(op.Gather(top_k, request), [1]),
                op.Unsqueeze(op.Gather(top_p, request), [1]),
                op.Unsqueeze(op.Gather(min_p, request), [1]),
            )
            flat = op.ScatterND(flat, op.Unsqueeze(row, [1]), found)
            wide = op.ScatterElements(wide, row, row * 0)
            go_on = op.ReduceMax(wide, keepdims=0) > 0
        filtered = op.Reshape(flat, op.Shape(logits))
    else:
        filtered = op.ScatterElements(others, token, p_token, axis=2)
    p = op.Identity(filtered)
    return p  # noqa: RET504 (the name of the graph's output)


@formula
def logprobs(
    p: FLOAT[B, R, V], logits: FLOAT[B, R, V], temperature: FLOAT[B], tokens: INT64[B, R]
) -> tuple[FLOAT[B, R], FLOAT[B, R, N], INT64[B, R, N]]:
    """Log-probabilities of given tokens and of the N = 20 likeliest ones under the target's law.

    At T = 0, where p could only say 0 and -infinity, under the softmax of the logits: p is not looked at.
    """
    softmax = op.Softmax(logits, axis=-1)
    count = op.Constant(value_ints=[ALTERNATIVES])
    of_p, tokens_of_p = largest(p, count)
    of_softmax, tokens_of_softmax = largest(softmax, count)
    given = op.Where(op.And(tokens >= 0, tokens < op.Shape(p, start=2)), tokens, 0)

    samples = op.Unsqueeze(temperature > 0.0, [1])
    logprob = logarithm(op.Where(samples, probability(p, given), probability(softmax, given)))
    samples = op.Unsqueeze(samples, [2])
    top_logprobs = logarithm(op.Where(samples, of_p, of_softmax))
    top_tokens = op.Where(samples, tokens_of_p, tokens_of_softmax)
    return logprob, top_logprobs, top_tokens
