"""The controls of a request, from raw logits to the law that tokens are drawn from.

    E             edited tokens a row; padding repeats one of them with the same numbers
    N             alternatives a row, in descending order of their probability

A row's outputs depend, to the bit, on that row's inputs alone.
"""

from onnxscript import BOOL, FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import B, R, V, formula, law, logarithm, missing_in, probability
from forerun_export.sampling.candidates import largest

INFINITY = float("inf")
E, N = "E", "N"
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
def logprobs(
    p: FLOAT[B, R, V], logits: FLOAT[B, R, V], temperature: FLOAT[B], tokens: INT64[B, R]
) -> tuple[FLOAT[B, R], FLOAT[B, R, N], INT64[B, R, N]]:
    """Log-probabilities of given tokens and of the N = 20 likeliest ones under the target's law.

    At T = 0, where p could only say 0 and -infinity, under the softmax of the logits: p is not looked at.
    """
    softmax = op.Softmax(logits, axis=-1)
    count = op.Constant(value_ints=[ALTERNATIVES])
    missing = missing_in(p)
    of_p, tokens_of_p = largest(p, missing, count)
    of_softmax, tokens_of_softmax = largest(softmax, missing, count)
    given = op.Where(op.And(tokens >= 0, tokens < op.Shape(p, start=2)), tokens, 0)

    samples = op.Unsqueeze(temperature > 0.0, [1])
    logprob = logarithm(op.Where(samples, probability(p, given), probability(softmax, given)))
    samples = op.Unsqueeze(samples, [2])
    top_logprobs = logarithm(op.Where(samples, of_p, of_softmax))
    top_tokens = op.Where(samples, tokens_of_p, tokens_of_softmax)
    return logprob, top_logprobs, top_tokens
