"""The oracle against itself: exact laws, so every bound is rounding in float64."""

import itertools
import random
from functools import partial

import pytest

from forerun.oracle import (
    Law,
    Rule,
    Table,
    Tokens,
    acceptance_probability,
    argmax,
    draw_from_target_rule,
    greedy_step,
    inverse_cdf,
    joint_law,
    law_of,
    plain_law,
    residual,
    residual_rule,
    residual_step,
    total_variation,
)
from helpers.random_tables import markov, random_law

EXACT = 1e-12
POSITIONS = 3
LARGEST_UNIFORM = 1 - 2**-23


def whole_context(rng_seed: int, vocabulary_size: int) -> Table:
    def table(context: Tokens) -> Law:
        return random_law(random.Random(f"{rng_seed} {context}"), vocabulary_size)

    return table


def random_rows(seed: int, *, vocabulary_size: int = 4, zeros: float = 0.0) -> list[Law]:
    rng = random.Random(seed)
    return [random_law(rng, vocabulary_size, zeros=zeros) for _ in range(vocabulary_size)]


def one_hot(token: int, vocabulary_size: int) -> Law:
    return [float(x == token) for x in range(vocabulary_size)]


PAIRS: dict[str, tuple[Table, Table]] = {
    "random": (markov(random_rows(1)), markov(random_rows(2))),
    "depends on the whole context": (whole_context(3, 3), whole_context(4, 3)),
    "zeros in p": (markov(random_rows(5, zeros=0.5)), markov(random_rows(6))),
    "zeros in q": (markov(random_rows(7)), markov(random_rows(8, zeros=0.5))),
    "zeros in both": (markov(random_rows(9, zeros=0.5)), markov(random_rows(10, zeros=0.5))),
    "q equals p": (markov(random_rows(11)), markov(random_rows(11))),
    "disjoint supports": (markov([[0.3, 0.7, 0, 0]] * 4), markov([[0, 0, 0.6, 0.4]] * 4)),
    "one token": (markov([[1.0]]), markov([[1.0]])),
    "q is a point mass": (markov(random_rows(12)), markov([one_hot(x, 4) for x in (2, 0, 3, 1)])),
    "p is a point mass": (markov([one_hot(x, 4) for x in (2, 0, 3, 1)]), markov(random_rows(13))),
    "p and q nearly equal": (
        markov([[0.25, 0.25, 0.25, 0.25]] * 4),
        markov([[0.25 + 1e-9, 0.25 - 1e-9, 0.25, 0.25]] * 4),
    ),
    "p tiny where q is large": (markov([[1e-300, 1.0]] * 2), markov([[1.0, 1e-300]] * 2)),
}


@pytest.mark.parametrize("draft_length", [1, 2, 3, 4])
@pytest.mark.parametrize("pair", PAIRS)
def test_residual_keeps_the_joint_law_of_the_target(pair: str, draft_length: int) -> None:
    target, draft = PAIRS[pair]
    speculative = joint_law(target, draft, residual_rule, draft_length=draft_length, positions=POSITIONS)
    assert total_variation(speculative, plain_law(target, positions=POSITIONS)) <= EXACT


@pytest.mark.parametrize("draft_length", [1, 2, 3, 4])
def test_drawing_from_the_target_after_a_rejection_is_caught(draft_length: int) -> None:
    target, draft = PAIRS["random"]
    biased = joint_law(target, draft, draw_from_target_rule, draft_length=draft_length, positions=POSITIONS)
    assert sum(biased.values()) == pytest.approx(1, abs=EXACT)
    assert total_variation(biased, plain_law(target, positions=POSITIONS)) > 0.01


@pytest.mark.parametrize("pair", PAIRS)
def test_a_token_is_accepted_with_probability_sum_min_p_q(pair: str) -> None:
    p, q = (table((0,)) for table in PAIRS[pair])
    accepted = sum(q[x] * residual_rule([p, p], [q], (x,))[1].probability for x in range(len(q)) if q[x] > 0)
    assert accepted == pytest.approx(acceptance_probability(p, q), abs=EXACT)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", [residual_rule, draw_from_target_rule])
def test_the_outcomes_of_a_rule_are_a_law(pair: str, rule: Rule) -> None:
    target, draft = PAIRS[pair]
    for proposals in plain_law(draft, positions=2):
        prefixes = [proposals[:i] for i in range(3)]
        outcomes = rule([target(c) for c in prefixes], [draft(c) for c in prefixes[:2]], proposals)
        assert len(outcomes) == 3
        assert sum(outcome.probability for outcome in outcomes) == pytest.approx(1, abs=EXACT)
        for outcome in outcomes:
            assert sum(outcome.next_law) == pytest.approx(1, abs=EXACT)


def test_decisions_over_a_grid_of_uniforms_have_the_law_of_the_rule() -> None:
    """residual_step and residual_rule are two statements of one law: average the first over all uniforms."""
    p_rows, q_rows, proposals = [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]], [[0.25, 0.75, 0.0]], (1,)
    grid = [i / 64 for i in range(64)]
    counted: dict[Tokens, float] = {}
    for u, v in itertools.product(grid, grid):
        draw = partial(inverse_cdf, uniforms=(0.0, v))
        step = residual_step(p_rows, q_rows, proposals, accept_uniforms=[u], draw=draw)
        counted[step] = counted.get(step, 0.0) + 1 / 64**2
    exact: dict[Tokens, float] = {
        (n, token): outcome.probability * probability
        for n, outcome in enumerate(residual_rule(p_rows, q_rows, proposals))
        for token, probability in enumerate(outcome.next_law)
    }
    assert total_variation(counted, exact) < 2 / 64  # the grid's resolution, once for each uniform


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_UNIFORM])
def test_a_token_of_probability_zero_is_neither_accepted_nor_drawn(uniform: float) -> None:
    n, token = residual_step(
        [[0.0, 0.5, 0.5, 0.0]] * 2,
        [[0.5, 0.5, 0.0, 0.0]],
        [0],
        accept_uniforms=[uniform],
        draw=partial(inverse_cdf, uniforms=(uniform, uniform)),
    )
    assert (n, token) == (0, 2)


def test_inverse_cdf_reaches_every_block_with_its_probability() -> None:
    weights = [0.0] * 600
    weights[3], weights[255], weights[256], weights[599] = 1.0, 1.0, 2.0, 4.0
    drawn = [inverse_cdf(weights, (u / 8, v / 2)) for u in range(8) for v in range(2)]
    assert sorted(drawn) == [3] * 2 + [255] * 2 + [256] * 4 + [599] * 8


def test_temperature_zero_is_the_lowest_argmax_and_the_limit_of_small_temperatures() -> None:
    assert law_of([1.0, 3.0, 3.0, -1.0], 0) == [0, 1, 0, 0]
    assert law_of([1.0, 3.0, 2.0], 1e-4) == pytest.approx(law_of([1.0, 3.0, 2.0], 0), abs=EXACT)
    assert law_of([0.0, 5.0], 1e9) == pytest.approx([0.5, 0.5], abs=1e-8)


@pytest.mark.parametrize("proposals", list(itertools.product(range(3), repeat=2)))
def test_greedy_is_residual_on_one_hot_laws(proposals: Tokens) -> None:
    logit_rows = [[0.0, 2.0, 1.0], [3.0, 3.0, 0.0], [0.0, 1.0, 1.0]]
    residual_result = residual_step(
        [law_of(logits, 0) for logits in logit_rows],
        [one_hot(x, 3) for x in proposals],
        proposals,
        accept_uniforms=[LARGEST_UNIFORM, 0.0],
        draw=argmax,
    )
    assert greedy_step(logit_rows, proposals) == residual_result


def test_the_residual_of_equal_laws_is_the_target() -> None:
    assert residual([0.25, 0.75], [0.25, 0.75]) == [0.25, 0.75]


def test_total_variation_counts_what_only_one_side_has() -> None:
    assert total_variation({(0,): 1.0}, {(1,): 1.0}) == 1.0
    assert total_variation({(0,): 0.5, (1,): 0.5}, {(0,): 0.25, (1,): 0.75}) == 0.25
