"""The likeliest tokens of each row, and what the filters keep of them.

M             candidates a row, in descending order of their logits
weight        a candidate's probability before the filters
before        the weight of the row's tokens that stand before the candidates
"""

from onnxscript import BOOL, FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import FINE_LENGTH, B, R, V, cut_finely, formula

INFINITY = float("inf")
M = "M"
PART_LENGTH = 8


@formula
def largest(logits: FLOAT[B, R, V], missing: INT64[1], count: INT64[1]) -> tuple[FLOAT[B, R, M], INT64[B, R, M]]:
    """The `count` largest logits of each row, in descending order, and their tokens.

    They lie in the `count` blocks of 64 with the largest maxima, and there in the `count` parts of 8; looking there
    first makes the search many times faster. Which of the equals at the end are left out is not said. Only a logit of
    -infinity may come with a number past the vocabulary, from the filling of the last block.
    """
    size = op.Shape(logits, start=2)
    blocks = cut_finely(logits, missing, -INFINITY)
    block_maxima = op.ReduceMax(blocks, [3], keepdims=0)
    _, block = op.TopK(block_maxima, op.Min(count, op.Shape(block_maxima, start=2)), sorted=0)
    parts = op.Reshape(op.GatherND(blocks, op.Unsqueeze(block, [3]), batch_dims=2), [0, 0, -1, 8])
    part_maxima = op.ReduceMax(parts, [3], keepdims=0)
    _, part = op.TopK(part_maxima, op.Min(count, op.Shape(part_maxima, start=2)), sorted=0)
    inside = op.Reshape(op.GatherND(parts, op.Unsqueeze(part, [3]), batch_dims=2), [0, 0, -1])
    logit, place = op.TopK(inside, op.Min(count, size))

    offset = op.GatherElements(part, place / PART_LENGTH, axis=2) * PART_LENGTH + op.Mod(place, PART_LENGTH)
    start = op.GatherElements(block, offset / FINE_LENGTH, axis=2) * FINE_LENGTH
    return logit, start + op.Mod(offset, FINE_LENGTH)


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
def go_on(weight: FLOAT[B, R, M], chosen: BOOL[B, R, M]) -> BOOL[B, R, 1]:
    """Whether a token behind the candidates may equal the last one chosen: it may if its weight can be as large."""
    last = op.ReduceMin(weight, [2], keepdims=1)
    least = op.ReduceMin(op.Where(chosen, weight, INFINITY), [2], keepdims=1)
    return op.And(last > 0.0, last >= least)


@formula
def top_k_edge(
    logit: FLOAT[B, R, M],
    weight: FLOAT[B, R, M],
    top_k: FLOAT[B, R, 1],
    count_before: FLOAT[B, R, 1],
    before: FLOAT[B, R, 1],
) -> tuple[FLOAT[B, R, 1], FLOAT[B, R, 1], BOOL[B, R, 1]]:
    """The k-th largest logit of the row, the weight of all that are no less, and whether both are right.

    They are if it is among the candidates with all its equals. Where k = 0 all are kept: -infinity and 1.
    """
    everything = top_k == 0.0
    rank = op.Cast(op.Range(0, op.Squeeze(op.Shape(logit, start=2), [0]), 1), to=FLOAT.dtype)
    among_k = rank + count_before < top_k
    kth = op.ReduceMin(op.Where(among_k, logit, INFINITY), [2], keepdims=1)
    total = before + op.ReduceSum(op.Where(logit >= kth, weight, 0.0), [2], keepdims=1)
    is_inside = op.And(count_before < top_k, op.Not(go_on(weight, among_k)))
    return op.Where(everything, -INFINITY, kth), op.Where(everything, 1.0, total), op.Or(everything, is_inside)


@formula
def kept_candidates(
    logit: FLOAT[B, R, M],
    token: INT64[B, R, M],
    weight: FLOAT[B, R, M],
    before: FLOAT[B, R, 1],
    kth: FLOAT[B, R, 1],
    nucleus: FLOAT[B, R, 1],
    least_weight: FLOAT[B, R, 1],
) -> tuple[FLOAT[B, R, M], FLOAT[B, R, 1], BOOL[B, R, 1]]:
    """The weights that the filters keep, their sum with what is before, and whether nothing behind is kept.

    Each filter keeps a prefix of the descending order: top-k what is no less than the k-th, top-p what has less than
    `nucleus` of the weight before it, min-p what has at least `least_weight`.
    """
    among_k = op.Where(logit >= kth, weight, 0.0)
    up_to = before + op.CumSum(among_k, 2)
    in_nucleus = op.And(logit >= kth, before + op.CumSum(among_k, 2, exclusive=1) < nucleus)
    chosen = op.And(in_nucleus, weight >= least_weight)

    kept = logit >= op.ReduceMin(op.Where(chosen, logit, INFINITY), [2], keepdims=1)
    if op.ReduceMax(op.Cast(op.And(kept, op.Not(chosen)), to=INT64.dtype), keepdims=0) > 0:
        keep = last_of_equals(logit, token, chosen)
    else:
        keep = op.Identity(kept)
    all_kept = op.Max(before, op.ReduceMax(op.Where(chosen, up_to, 0.0), [2], keepdims=1))
    return weight * op.Cast(keep, to=FLOAT.dtype), all_kept, op.Not(go_on(weight, chosen))


@formula
def weight_of(weights: FLOAT[B, R, V], token: INT64[B, R, M]) -> FLOAT[B, R, M]:
    """What each row gives to its candidates; to the filling of the last block 0, or NaN in a row without a law."""
    size = op.Shape(weights, start=2)
    weight = op.GatherElements(weights, op.Min(token, size - 1), axis=2)
    return op.Where(token < size, weight, weight * 0.0)


@formula
def put(rows: FLOAT[B, R, V], token: INT64[B, R, M], value: FLOAT[B, R, M]) -> FLOAT[B, R, V]:
    """Rows with new values at the candidates. The filling of the last block writes the first one's value again."""
    size = op.Shape(rows, start=2)
    filling = token >= size
    inside = op.Where(filling, op.Min(token[:, :, :1], size - 1), token)
    return op.ScatterElements(rows, inside, op.Where(filling, value[:, :, :1], value), axis=2)
