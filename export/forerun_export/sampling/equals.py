"""The laws of rows whose filters end among more equal logits than a band holds.

    N             such rows
    larger        the weights of the tokens before the equals, 0 elsewhere
    equals        1 at the equals, 0 elsewhere

Where the logit of the equals is known, one look at whole rows decides; else it is found by bisection.
"""

from onnxscript import BOOL, FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import FINE_LENGTH, V, cut_finely, formula

INFINITY = float("inf")
N = "N"


@formula
def first_kept(equals: FLOAT[N, V], count: FLOAT[N, 1], missing: INT64[1]) -> INT64[N, 1]:
    """The lowest token that has fewer than `count` of the equals behind it; if `count` is not above 0, none of these.

    In two stages, its block of 64 and its place there, because CumSum runs on one core of a CPU.
    """
    blocks = op.Squeeze(cut_finely(op.Unsqueeze(equals, [0]), missing, 0.0), [0])
    behind = op.CumSum(op.ReduceSum(blocks, [2], keepdims=0), 1, exclusive=1, reverse=1)
    blocks_before = op.ReduceSum(op.Cast(behind >= count, to=INT64.dtype), [1])
    block = op.Min(blocks_before, op.Shape(behind, start=1) - 1)
    inside = op.GatherND(blocks, block, batch_dims=1)
    behind_inside = op.GatherElements(behind, block, axis=1) + op.CumSum(inside, 1, exclusive=1, reverse=1)
    return block * FINE_LENGTH + op.ReduceSum(op.Cast(behind_inside >= count, to=INT64.dtype), [1])


@formula
def law_of_last_equals(
    weights: FLOAT[N, V],
    larger: FLOAT[N, V],
    equals: FLOAT[N, V],
    nucleus: FLOAT[N, 1],
    least_weight: FLOAT[N, 1],
    missing: INT64[1],
) -> FLOAT[N, V]:
    """The law of all that is larger and of the last of the equals, as many as the nucleus takes; without what min-p
    rules out.

    They are counted: float32 sums of a hundred thousand equal numbers err by some of these.
    """
    of_equals = equals * weights
    count = (nucleus - op.ReduceSum(larger, [1])) / op.ReduceMax(of_equals, [1])
    first = first_kept(equals, count, missing)
    token = op.Range(0, op.Squeeze(op.Shape(equals, start=1), [0]), 1)
    kept = larger + of_equals * op.Cast(token >= first, to=FLOAT.dtype)
    kept = kept * op.Cast(kept >= least_weight, to=FLOAT.dtype)
    return kept / op.ReduceSum(kept, [1])


@formula
def kth_among_equals(
    p: FLOAT[N, V], logits: FLOAT[N, V], k: FLOAT[N, 1], tied: FLOAT[N, 1], weight: FLOAT[N, 1]
) -> tuple[FLOAT[N, 1], BOOL[N, 1]]:
    """The weight of all logits that are no less than `tied`, and whether that is the k-th; `weight` is its own."""
    is_larger = op.Cast(logits > tied, to=FLOAT.dtype)
    larger = op.ReduceSum(is_larger, [1])
    no_less = op.ReduceSum(op.Cast(logits >= tied, to=FLOAT.dtype), [1])
    total = op.ReduceSum(is_larger * p, [1]) + (no_less - larger) * weight
    return total, op.And(larger < k, no_less >= k)


@formula
def laws_among_equals(
    p: FLOAT[N, V],
    logits: FLOAT[N, V],
    tied: FLOAT[N, 1],
    kth: FLOAT[N, 1],
    nucleus: FLOAT[N, 1],
    least_weight: FLOAT[N, 1],
    missing: INT64[1],
) -> tuple[FLOAT[N, V], BOOL[N]]:
    """The laws after the filters if these end among the logits equal to `tied`; and whether they do."""
    larger = op.Cast(logits > tied, to=FLOAT.dtype) * p
    equals = op.Cast(logits == tied, to=FLOAT.dtype)
    before = op.ReduceSum(larger, [1])
    ends = op.Or(tied == kth, op.And(tied > kth, before + op.ReduceSum(equals * p, [1]) >= nucleus))
    laws = law_of_last_equals(p, larger, equals, nucleus, least_weight, missing)
    return laws, op.Squeeze(op.And(before < nucleus, ends), [1])


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
    missing: INT64[1],
) -> FLOAT[N, V]:
    """The laws after the filters, whatever they keep."""
    # Below this, probabilities are 0 in float32.
    lowest = op.ReduceMax(logits, [1]) - temperature * 128.0
    k = op.Where(top_k > 0, op.Cast(top_k, to=FLOAT.dtype), INFINITY)
    low_k, _high_k = edge(op.Expand(1.0, op.Shape(p)), logits, k, lowest)
    weights = p * op.Cast(logits > low_k, to=FLOAT.dtype)

    nucleus = op.Where(top_p < 1.0, op.Max(top_p, 1e-30) * op.ReduceSum(weights, [1]), INFINITY)
    low, high = edge(weights, logits, nucleus, low_k)
    is_larger = op.Cast(logits > high, to=FLOAT.dtype)
    equals = op.Cast(logits > low, to=FLOAT.dtype) - is_larger
    least_weight = min_p * op.ReduceMax(weights, [1])
    return law_of_last_equals(weights, is_larger * weights, equals, nucleus, least_weight, missing)
