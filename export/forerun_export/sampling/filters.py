"""The law after top-k, top-p and min-p.

Each keeps a prefix of the descending order of logits. A nucleus ends before the first token with top_p of the weight
before it, or more, as float32 sums it up; rounding may move this edge by the tokens within 2e-5 of the weight.

A row's outputs depend, to the bit, on that row's inputs alone.
"""

from onnxscript import BOOL, FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import B, R, V, formula, law, missing_in
from forerun_export.sampling.candidates import M, kept_candidates, largest, put, top_k_edge, weight_of
from forerun_export.sampling.equals import bisected_laws
from forerun_export.sampling.wide_rows import wide_laws

INFINITY = float("inf")
N = "N"
CANDIDATES = 320  # nuclei of peaked laws are smaller, and are found among these
AMONG_MORE = 8  # the spacing of a sample that stands for these
MORE_CANDIDATES = 2048  # for rows whose top-k alone is beyond the candidates, but not beyond these


@formula
def candidates(
    logits: FLOAT[B, R, V],
    unfiltered: FLOAT[B, R, V],
    filters: BOOL[B],
    top_k: INT64[B],
    top_p: FLOAT[B],
    min_p: FLOAT[B],
    missing: INT64[1],
    count: INT64[1],
) -> tuple[INT64[B, R, M], FLOAT[B, R, M], FLOAT[B, R, M], BOOL[B, R]]:
    """The `count` likeliest tokens, their weights, their law, and whether a filtered row keeps others too."""
    logit, token = largest(logits, missing, count)
    weight = weight_of(unfiltered, token)
    k = op.Cast(op.Unsqueeze(top_k, [1, 2]), to=FLOAT.dtype)
    nothing = k * 0.0
    kth, total, found_k = top_k_edge(logit, weight, k, nothing, nothing)
    share = op.Unsqueeze(op.Where(top_p < 1.0, op.Max(top_p, 1e-30), INFINITY), [1, 2])
    least_weight = op.Unsqueeze(min_p, [1, 2]) * weight[:, :, :1]
    kept, all_kept, found = kept_candidates(logit, token, weight, nothing, kth, share * total, least_weight)

    p = op.Where(op.Unsqueeze(filters, [1, 2]), kept / all_kept, weight)
    is_wide = op.And(op.Unsqueeze(filters, [1]), op.Squeeze(op.Not(op.And(found, found_k)), [2]))
    return token, weight, p, is_wide


@formula
def narrow_laws(
    unfiltered: FLOAT[B, R, V], filters: BOOL[B], token: INT64[B, R, M], p: FLOAT[B, R, M]
) -> FLOAT[B, R, V]:
    """What filtered rows keep of the candidates; the other rows as they are."""
    others = unfiltered * op.Cast(op.Not(op.Unsqueeze(filters, [1, 2])), to=FLOAT.dtype)
    return put(others, token, p)


@formula
def laws_among_more(
    row: INT64[N, 2],
    logits: FLOAT[B, R, V],
    unfiltered: FLOAT[B, R, V],
    filters: BOOL[B],
    top_k: INT64[B],
    top_p: FLOAT[B],
    min_p: FLOAT[B],
    missing: INT64[1],
) -> tuple[FLOAT[N, V], BOOL[N]]:
    """The laws of these rows among more candidates, and whether they are right."""
    request = row[:, :1]
    rows_logits = op.Unsqueeze(op.GatherND(logits, row), [1])
    rows_unfiltered = op.Unsqueeze(op.GatherND(unfiltered, row), [1])
    rows_filters = op.GatherND(filters, request)
    count = op.Constant(value_ints=[MORE_CANDIDATES])
    k, share, least = op.GatherND(top_k, request), op.GatherND(top_p, request), op.GatherND(min_p, request)
    token, _weight, p, is_wide = candidates(rows_logits, rows_unfiltered, rows_filters, k, share, least, missing, count)
    laws = narrow_laws(rows_unfiltered, rows_filters, token, p)
    return op.Squeeze(laws, [1]), op.Squeeze(op.Not(is_wide), [1])


@formula
def laws_of_whole_rows(
    row: INT64[N, 2],
    logits: FLOAT[B, R, V],
    unfiltered: FLOAT[B, R, V],
    weight: FLOAT[B, R, M],
    temperature: FLOAT[B],
    top_k: INT64[B],
    top_p: FLOAT[B],
    min_p: FLOAT[B],
    missing: INT64[1],
    spacing: INT64[1],
) -> tuple[FLOAT[N, V], BOOL[N]]:
    """The laws of these rows, and whether they are right: by samples, or for spacing 1 by bisection, always right."""
    request = row[:, :1]
    p = op.GatherND(unfiltered, row)
    k = op.Unsqueeze(op.GatherND(top_k, request), [1])
    share = op.Unsqueeze(op.GatherND(top_p, request), [1])
    least = op.Unsqueeze(op.GatherND(min_p, request), [1])
    if op.Squeeze(spacing) > 1:
        laws, found = wide_laws(p, logits, row, k, share, least, op.GatherND(weight, row), missing, spacing)
    else:
        t = op.Unsqueeze(op.GatherND(temperature, request), [1])
        laws = bisected_laws(p, op.GatherND(logits, row), t, k, share, least, missing)
        found = op.Squeeze(k >= 0, [1])
    return laws, found


@formula
def with_laws(
    laws: FLOAT[B, R, V],
    row: INT64[N, 2],
    found_laws: FLOAT[N, V],
    filters: BOOL[B],
    token: INT64[B, R, M],
    p: FLOAT[B, R, M],
    are_unfiltered: BOOL,
) -> FLOAT[B, R, V]:
    """The laws with others in these rows, which are in order; and in the rest the narrow ones, if these are due.

    All rows are gathered instead, on all cores of a CPU, where ScatterND copies on one what it then writes over.
    """
    shape = op.Shape(laws, start=0, end=2)
    rows = op.Squeeze(op.Shape(laws, start=0, end=1) * op.Shape(laws, start=1, end=2), [0])
    if op.Squeeze(op.Shape(row, start=0, end=1)) == rows:
        place = op.Reshape(op.Range(0, rows, 1), op.Concat(shape, [1], axis=0))
        changed = op.GatherND(found_laws, place)
    elif are_unfiltered:
        changed = op.ScatterND(narrow_laws(laws, filters, token, p), row, found_laws)
    else:
        changed = op.ScatterND(laws, row, found_laws)
    return changed


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
    candidates is looked at whole, first with one token of 16 in the sample, then with one of 4, then by bisection;
    one with a top-k beyond the candidates first among more of them.
    """
    unfiltered = law(logits, temperature)
    filters = op.And(temperature > 0.0, op.Or(op.Or(top_k > 0, top_p < 1.0), min_p > 0.0))
    missing = missing_in(logits)
    count = op.Constant(value_ints=[CANDIDATES])
    token, weight, p_token, is_wide = candidates(logits, unfiltered, filters, top_k, top_p, min_p, missing, count)
    any_wide = op.ReduceMax(op.Cast(is_wide, to=INT64.dtype), keepdims=0) > 0
    if any_wide:
        laws = op.Identity(unfiltered)
        left = op.Identity(is_wide)
        among_more = op.Unsqueeze(op.And(top_k >= CANDIDATES, top_k < MORE_CANDIDATES), [1])
        any_among_more = op.ReduceMax(op.Cast(op.And(is_wide, among_more), to=INT64.dtype), keepdims=0) > 0
        first = op.Where(any_among_more, op.Constant(value_ints=[AMONG_MORE]), op.Constant(value_ints=[4]))
        spacing = op.Identity(first)
        searching = op.Identity(any_wide)
        while searching:
            row = op.Transpose(op.NonZero(op.And(left, op.Or(among_more, spacing < AMONG_MORE))))
            if op.Squeeze(spacing) == AMONG_MORE:
                found_laws, found = laws_among_more(row, logits, unfiltered, filters, top_k, top_p, min_p, missing)
            else:
                found_laws, found = laws_of_whole_rows(
                    row, logits, unfiltered, weight, temperature, top_k, top_p, min_p, missing, spacing
                )
            laws = with_laws(laws, row, found_laws, filters, token, p_token, op.Squeeze(spacing == first))
            left = op.ScatterND(left, row, op.Not(found))
            spacing = spacing / 2
            searching = op.ReduceMax(op.Cast(left, to=INT64.dtype), keepdims=0) > 0
        filtered = op.Identity(laws)
    else:
        filtered = narrow_laws(unfiltered, filters, token, p_token)
    p = op.Identity(filtered)
    return p  # noqa: RET504 (the name of the graph's output)
