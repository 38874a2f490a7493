"""Verification: from the target's laws and the proposals to the accepted count and the next token.

    p             the target's next-token laws [B,K+1,V], after all controls
    q             the laws that the proposals were drawn from [B,K,V]
    tokens        [B,K+1]: column 0 is the pending token, columns 1..K the proposals x_1..x_K
    valid         [B]: how many proposals of a row count, 0..K; what lies behind them is never looked at

A row of p or q without a law (NaN) ends the proposals before it. A next token from a row of p without a law
is -1: what was accepted before it stands. A row's outputs depend on that row's inputs alone.
"""

from onnxscript import BOOL, FLOAT, INT64
from onnxscript.onnx_opset import opset24 as op

from forerun_export.sampling.building_blocks import (
    K_PLUS_1,
    B,
    K,
    V,
    argmax,
    formula,
    inverse_cdf,
    is_proposal,
    leading,
    logarithm,
    probability,
    row_at,
)
from forerun_export.sampling.drawing import have_law, is_law
from forerun_export.sampling.noise import race

INFINITY = float("inf")


@formula
def at(values: FLOAT[B, K_PLUS_1], index: INT64[B]) -> FLOAT[B]:
    """Column index[b] of each row."""
    return op.Squeeze(op.GatherElements(values, op.Unsqueeze(index, [1]), axis=1), [1])


@formula
def countable(tokens: INT64[B, K_PLUS_1], valid: INT64[B], sound: BOOL[B, K]) -> INT64[B]:
    """How many proposals count: the valid ones before the first that has no sound law."""
    return leading(op.And(is_proposal(tokens, valid), sound))


@formula
def if_sound(sound: BOOL[B, K_PLUS_1], accepted: INT64[B], token: INT64[B]) -> INT64[B]:
    """The token, or -1 where it comes from a row without a law."""
    return op.Where(at(sound, accepted), token, -1)


@formula
def proposal_laws(p: FLOAT[B, K_PLUS_1, V], x: INT64[B, K]) -> FLOAT[B, K]:
    """p_i(x_i) for each proposal; row K has none, and any token does there."""
    return probability(p, op.Concat(x, x[:, :1], axis=1))[:, :-1]


@formula
def correction_or_bonus(
    residual: FLOAT[B, 1, V], p_n: FLOAT[B, 1, V], rejected: BOOL[B], uniforms: FLOAT[B, 2]
) -> INT64[B]:
    """A token drawn from the residual after a rejection, from p otherwise.

    A rejection means that p > q somewhere. If rounding hides that, p and q are equal to within float32, and so is
    any law between them: draw from p.
    """
    corrects = op.And(rejected, op.ReduceSum(residual, [1, 2], keepdims=0) > 0.0)
    correction, bonus = inverse_cdf(residual, uniforms), inverse_cdf(p_n, uniforms)
    return op.Where(corrects, op.Squeeze(correction, [1]), op.Squeeze(bonus, [1]))


@formula
def verify_residual(
    p: FLOAT[B, K_PLUS_1, V],
    q: FLOAT[B, K, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """Accept x_i with probability min(1, p_i(x_i)/q_i(x_i)) up to the first rejection; then draw once more.

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2.
    """
    sound = is_law(p)
    proposals = countable(tokens, valid, op.And(sound[:, :-1], is_law(q)))
    counts = is_proposal(tokens, proposals)
    x = op.Where(counts, tokens[:, 1:], 0)
    n = leading(op.And(counts, accept_uniforms * probability(q, x) < proposal_laws(p, x)))

    rejected = n < proposals
    p_n = row_at(p, n)
    q_n = row_at(q, op.Where(rejected, n, 0))
    y_n = correction_or_bonus(op.Relu(p_n - q_n), p_n, rejected, draw_uniforms)
    accepted, next_token = op.Identity(n), if_sound(sound, n, y_n)
    return accepted, next_token


@formula
def verify_points(
    p: FLOAT[B, K_PLUS_1, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """`verify_residual` of proposals that were not drawn: q is 1 at x_i, and the residual is p without x_i.

    `block` has nothing to gain here: no rule accepts i proposals more often than p emits them, and this one does so
    just as often.
    """
    sound = is_law(p)
    proposals = countable(tokens, valid, sound[:, :-1])
    counts = is_proposal(tokens, proposals)
    x = op.Where(counts, tokens[:, 1:], 0)
    n = leading(op.And(counts, accept_uniforms < proposal_laws(p, x)))

    rejected = n < proposals
    p_n = row_at(p, n)
    x_n = op.Unsqueeze(at(x, op.Where(rejected, n, 0)), [1, 2])
    without_x = op.ScatterElements(p_n, x_n, op.Cast(x_n, to=FLOAT.dtype) * 0.0, axis=2)
    y_n = correction_or_bonus(without_x, p_n, rejected, draw_uniforms)
    accepted, next_token = op.Identity(n), if_sound(sound, n, y_n)
    return accepted, next_token


@formula
def prefix_masses(ratios: FLOAT[B, K]) -> FLOAT[B, K]:
    """P_i = min(1, P_{i-1} ratio_i), P_0 = 1, for the logarithms of the ratios.

    With L_i their sum up to i: P_i = exp(L_i - max(L_0, .., L_i)).
    """
    sums = op.CumSum(ratios, 1)
    place = op.Range(0, op.Squeeze(op.Shape(ratios, start=1), [0]), 1)
    up_to = op.Unsqueeze(place, [0]) <= op.Unsqueeze(place, [1])
    highest = op.ReduceMax(op.Where(up_to, op.Unsqueeze(sums, [1]), -INFINITY), [2], keepdims=0)
    return op.Exp(sums - op.Max(highest, 0.0))


@formula
def log_ratio(p_x: FLOAT[B, K], q_x: FLOAT[B, K]) -> FLOAT[B, K]:
    """log(p/q), -infinity where p = 0. Below 200, which is above that of any two positive float32 numbers.

    The bound keeps infinity - infinity out of what follows.
    """
    return op.Where(p_x > 0.0, op.Min(logarithm(p_x) - logarithm(q_x), 200.0), -INFINITY)


@formula
def verify_block(
    p: FLOAT[B, K_PLUS_1, V],
    q: FLOAT[B, K, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    accept_uniforms: FLOAT[B, K],
    draw_uniforms: FLOAT[B, 2],
) -> tuple[INT64[B], INT64[B]]:
    """Accept the longest prefix whose u_i < h_i; then draw from ReLU(P_i p - q), from p if all were accepted.

    Sun et al. 2403.10444, algorithm 2: P_i = min(1, P_{i-1} p(x_i)/q(x_i)), s_i = sum of ReLU(P_i p - q) after x_i,
    h_i = s_i / (s_i + 1 - P_i), 1 where that is 0/0; h = P_i at the last proposal.
    """
    sound = is_law(p)
    proposals = countable(tokens, valid, op.And(sound[:, :-1], is_law(q)))
    counts = is_proposal(tokens, proposals)
    x = op.Where(counts, tokens[:, 1:], 0)
    ratios = op.Where(counts, log_ratio(proposal_laws(p, x), probability(q, x)), -INFINITY)
    mass = prefix_masses(ratios)

    after = op.Relu(op.Unsqueeze(mass[:, :-1], [2]) * p[:, 1:-1] - q[:, 1:])
    s = op.ReduceSum(after, [2], keepdims=0)
    weight = s + (1.0 - mass[:, :-1])
    h = op.Concat(op.Where(weight > 0.0, s / weight, 1.0), mass[:, -1:], axis=1)
    i = op.Range(1, op.Squeeze(op.Shape(tokens, start=1), [0]), 1)
    is_last = i == op.Unsqueeze(proposals, [1])
    keeps = op.And(counts, accept_uniforms < op.Where(is_last, mass, h))
    n = op.ReduceMax(op.Where(keeps, i, 0), [1], keepdims=0)

    rejected = n < proposals
    p_n = row_at(p, n)
    q_n = row_at(q, op.Where(rejected, n, 0))
    mass_n = at(op.Concat(op.Expand(1.0, op.Shape(mass[:, :1])), mass, axis=1), n)
    residual = op.Relu(op.Unsqueeze(mass_n, [1, 2]) * p_n - q_n)
    y_n = correction_or_bonus(residual, p_n, rejected, draw_uniforms)
    accepted, next_token = op.Identity(n), if_sound(sound, n, y_n)
    return accepted, next_token


@formula
def agreement(
    y: INT64[B, K_PLUS_1], tokens: INT64[B, K_PLUS_1], valid: INT64[B], sound: BOOL[B, K_PLUS_1]
) -> tuple[INT64[B], INT64[B]]:
    """Accept while x_i is y_i, the token that the target takes itself, n times; emit y_n."""
    proposals = countable(tokens, valid, sound[:, :-1])
    agrees = op.And(is_proposal(tokens, proposals), tokens[:, 1:] == y[:, :-1])
    n = leading(agrees)
    return n, if_sound(sound, n, at(y, n))


@formula
def verify_coupled(
    p: FLOAT[B, K_PLUS_1, V],
    tokens: INT64[B, K_PLUS_1],
    valid: INT64[B],
    noise_keys: INT64[B, 2],
    positions: INT64[B, K_PLUS_1],
) -> tuple[INT64[B], INT64[B]]:
    """y_i is the token that plain decoding with these keys draws at this position, whatever was proposed."""
    accepted, next_token = agreement(race(p, noise_keys, positions), tokens, valid, is_law(p))
    return accepted, next_token


@formula
def verify_greedy(
    logits: FLOAT[B, K_PLUS_1, V], tokens: INT64[B, K_PLUS_1], valid: INT64[B]
) -> tuple[INT64[B], INT64[B]]:
    """y_i is the argmax."""
    y = argmax(logits)
    accepted, next_token = agreement(y, tokens, valid, have_law(logits, y))
    return accepted, next_token
