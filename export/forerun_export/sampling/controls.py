"""The controls of a request, from raw logits to the law that tokens are drawn from.

    E             edited tokens a row; padding repeats one of them with the same numbers
    M             candidates a row: the largest logits, in descending order
    weight        a candidate's probability before the filters

A row's outputs depend, to the bit, on that row's inputs alone.
"""

from onnxscript import BOOL, FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import B, R, V, formula, law, probability

INFINITY = float("inf")
E, M, N = "E", "M", "N"
PREFILTER_LENGTH = 64
# Candidates that are tried before the whole vocabulary is sorted. Few: nuclei are mostly small.
FEW, MANY = 256, 2048
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
    missing = op.Mod(-size, PREFILTER_LENGTH)
    blocks = op.Reshape(op.Pad(logits, op.Concat([0, 0, 0, 0, 0], missing, axis=0), -INFINITY), [0, 0, -1, 64])
    maxima = op.ReduceMax(blocks, [3], keepdims=0)
    _, block = op.TopK(maxima, op.Min(count, op.Shape(maxima, start=2)))
    inside = op.Reshape(op.GatherND(blocks, op.Unsqueeze(block, [3]), batch_dims=2), [0, 0, -1])
    logit, place = op.TopK(inside, op.Min(count, size))
    start = op.GatherElements(block, place / PREFILTER_LENGTH, axis=2) * PREFILTER_LENGTH
    return logit, start + op.Mod(place, PREFILTER_LENGTH)


@formula
def last_of_equals(logit: FLOAT[B, R, M], token: INT64[B, R, M], chosen: BOOL[B, R, M]) -> BOOL[B, R, M]:
    """As many candidates as chosen, but of those equal to the last one the highest tokens.

    Hugging Face removes in ascending order, lower tokens first, so a nucleus that ends among equals keeps these.
    """
    edge = op.ReduceMin(op.Where(chosen, logit, INFINITY), [2], keepdims=1)
    ties = logit == edge
    kept_ties = op.ReduceSum(op.Cast(op.And(chosen, ties), to=INT64.dtype), [2], keepdims=1)
    tied, _ = op.TopK(op.Where(ties, op.Cast(token, to=FLOAT.dtype), -1.0), op.Shape(logit, start=2))
    rank = op.Range(0, op.Squeeze(op.Shape(logit, start=2), [0]), 1)
    lowest = op.ReduceMin(op.Where(rank < kept_ties, tied, INFINITY), [2], keepdims=1)
    return op.Or(logit > edge, op.And(ties, op.Cast(token, to=FLOAT.dtype) >= lowest))


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
    top_p of the remaining weight before it, min-p what has min_p of the first one's weight. The sums run from the
    largest candidate on, so that more candidates do not change a bit of them.
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

    edge = op.ReduceMin(op.Where(chosen, logit, INFINITY), [2], keepdims=1)
    kept = logit >= edge
    if op.ReduceMax(op.Cast(op.And(kept, op.Not(chosen)), to=INT64.dtype), keepdims=0) > 0:
        keep = last_of_equals(logit, token, chosen)
    else:
        keep = op.Identity(kept)
    kept_weight = op.ReduceMax(op.Where(chosen, up_to, 0.0), [2], keepdims=1)
    law_of_kept = weight * op.Cast(keep, to=FLOAT.dtype) / kept_weight

    last, last_weight = logit[:, :, -1:], weight[:, :, -1:]
    goes_on = op.And(last_weight > 0.0, op.Or(last >= edge, op.And(k > 0, last >= kth)))
    return law_of_kept, op.Squeeze(op.Not(goes_on), [2])


@formula
def candidates(
    logits: FLOAT[B, R, V],
    unfiltered: FLOAT[B, R, V],
    filters: BOOL[B],
    top_k: INT64[B],
    top_p: FLOAT[B],
    min_p: FLOAT[B],
    count: INT64[1],
) -> tuple[INT64[B, R, M], FLOAT[B, R, M], BOOL]:
    """The `count` likeliest tokens, what the law gives them, and whether that says all about every filtered row."""
    logit, token = largest(logits, count)
    size = op.Shape(logits, start=2)
    filling = token >= size
    token = op.Where(filling, op.Min(token[:, :, :1], size - 1), token)
    weight = op.Where(filling, 0.0, op.GatherElements(unfiltered, token, axis=2))
    law_of_kept, enough = filtered_candidates(logit, token, weight, top_k, top_p, min_p)

    p = op.Where(op.Unsqueeze(filters, [1, 2]), law_of_kept, weight)
    p = op.Where(filling, p[:, :, :1], p)
    short = op.And(op.Unsqueeze(filters, [1]), op.Not(enough))
    return token, p, op.ReduceMax(op.Cast(short, to=INT64.dtype), keepdims=0) == 0


@formula
def law_filtered(
    logits: FLOAT[B, R, V],
    temperature: FLOAT[B],
    top_k: INT64[B],
    top_p: FLOAT[B],
    min_p: FLOAT[B],
) -> FLOAT[B, R, V]:
    """p after top-k, top-p and min-p, in this order; 0, 1 and 0 switch them off. At T = 0 they change nothing.

    Holtzman et al. 1904.09751 (top-p), Nguyen et al. 2407.01082 (min-p). Exact: where a filtered row keeps its last
    candidate more are taken, in the end the whole vocabulary.
    """
    unfiltered = law(logits, temperature)
    filters = op.And(temperature > 0.0, op.Or(op.Or(top_k > 0, top_p < 1.0), min_p > 0.0))
    others = unfiltered * op.Cast(op.Not(op.Unsqueeze(filters, [1, 2])), to=FLOAT.dtype)
    few, p_few, enough = candidates(
        logits, unfiltered, filters, top_k, top_p, min_p, op.Constant(value_ints=[FEW])
    )
    if enough:
        filtered = op.ScatterElements(others, few, p_few, axis=2)
    else:
        many, p_many, many_enough = candidates(
            logits, unfiltered, filters, top_k, top_p, min_p, op.Constant(value_ints=[MANY])
        )
        if many_enough:
            filtered = op.ScatterElements(others, many, p_many, axis=2)
        else:
            every, p_every, _ = candidates(
                logits, unfiltered, filters, top_k, top_p, min_p, op.Shape(logits, start=2)
            )
            filtered = op.ScatterElements(others, every, p_every, axis=2)
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
    logprob = op.Log(op.Where(samples, probability(p, given), probability(softmax, given)))
    samples = op.Unsqueeze(samples, [2])
    top_logprobs = op.Log(op.Where(samples, of_p, of_softmax))
    top_tokens = op.Where(samples, tokens_of_p, tokens_of_softmax)
    return logprob, top_logprobs, top_tokens
