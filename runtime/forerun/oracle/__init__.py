"""What the sampling graphs are held to: the laws of acceptance and the controls in plain Python and float64.

    law         next-token probabilities, one for each token of the vocabulary
    context     the committed tokens, oldest first
    table       a language model: context -> law
    proposals   x_1 .. x_K; p_rows has a law for each of them and one more, q_rows one for each
    rule        a law of acceptance as probabilities in place of uniforms, so that it can be summed over

`laws` makes the decisions of one round from given uniforms, `coupling` those that come from keyed noise, `filters`
turns logits into laws, `enumeration` sums over all that can happen in several rounds.
"""

from forerun.oracle.coupling import (
    PRIME,
    RACE_BLOCK_LENGTH,
    Keys,
    exponential,
    joint_flat_race,
    joint_race,
    keyed_draw,
    match_probability,
    noise,
    race,
    stream,
)
from forerun.oracle.enumeration import (
    Outcome,
    Rule,
    Table,
    block_rule,
    coupled_rule,
    draw_from_target_rule,
    expected_accepted,
    expected_tokens,
    joint_law,
    plain_law,
    residual_rule,
    total_variation,
)
from forerun.oracle.filters import Edit, edited, filtered_law
from forerun.oracle.laws import (
    BLOCK_LENGTH,
    Draw,
    Law,
    Tokens,
    acceptance_probability,
    argmax,
    block_acceptance,
    block_step,
    coupled_step,
    greedy_step,
    inverse_cdf,
    law_of,
    one_hot,
    points_step,
    residual,
    residual_step,
)

__all__ = [
    "BLOCK_LENGTH",
    "PRIME",
    "RACE_BLOCK_LENGTH",
    "Draw",
    "Edit",
    "Keys",
    "Law",
    "Outcome",
    "Rule",
    "Table",
    "Tokens",
    "acceptance_probability",
    "argmax",
    "block_acceptance",
    "block_rule",
    "block_step",
    "coupled_rule",
    "coupled_step",
    "draw_from_target_rule",
    "edited",
    "expected_accepted",
    "expected_tokens",
    "exponential",
    "filtered_law",
    "greedy_step",
    "inverse_cdf",
    "joint_flat_race",
    "joint_law",
    "joint_race",
    "keyed_draw",
    "law_of",
    "match_probability",
    "noise",
    "one_hot",
    "plain_law",
    "points_step",
    "race",
    "residual",
    "residual_rule",
    "residual_step",
    "stream",
    "total_variation",
]
