"""Block verification, point masses and the race, enumerated: exact laws, so every bound is rounding in float64."""

import itertools
import random
from collections.abc import Sequence
from functools import partial

import pytest

from forerun.oracle import (
    Law,
    Outcome,
    Rule,
    Table,
    Tokens,
    acceptance_probability,
    block_acceptance,
    block_rule,
    block_step,
    coupled_rule,
    coupled_step,
    expected_accepted,
    expected_tokens,
    inverse_cdf,
    joint_flat_race,
    joint_law,
    joint_race,
    keyed_draw,
    match_probability,
    one_hot,
    plain_law,
    points_step,
    residual_rule,
    residual_step,
    total_variation,
)
from helpers.random_tables import markov, random_law

EXACT = 1e-12
POSITIONS = 3
LARGEST_UNIFORM = 1 - 2**-23


def random_rows(seed: int, *, vocabulary_size: int = 3, zeros: float = 0.0) -> list[Law]:
    rng = random.Random(seed)
    return [random_law(rng, vocabulary_size, zeros=zeros) for _ in range(vocabulary_size)]


def whole_context(seed: int, vocabulary_size: int) -> Table:
    return lambda context: random_law(random.Random(f"{seed} {context}"), vocabulary_size)


PAIRS: dict[str, tuple[Table, Table]] = {
    "random": (markov(random_rows(1)), markov(random_rows(2))),
    "depends on the whole context": (whole_context(3, 3), whole_context(4, 3)),
    "zeros in p": (markov(random_rows(5, zeros=0.5)), markov(random_rows(6))),
    "zeros in q": (markov(random_rows(7)), markov(random_rows(8, zeros=0.5))),
    "zeros in both": (markov(random_rows(9, zeros=0.5)), markov(random_rows(10, zeros=0.5))),
    "q equals p": (markov(random_rows(11)), markov(random_rows(11))),
    "disjoint supports": (markov([[0.3, 0.7, 0, 0]] * 4), markov([[0, 0, 0.6, 0.4]] * 4)),
    "one token": (markov([[1.0]]), markov([[1.0]])),
    "q is a point mass": (markov(random_rows(12)), markov([one_hot(x, 3) for x in (2, 0, 1)])),
    "p is a point mass": (markov([one_hot(x, 3) for x in (2, 0, 1)]), markov(random_rows(13))),
    "p and q nearly equal": (
        markov([[0.25, 0.25, 0.25, 0.25]] * 4),
        markov([[0.25 + 1e-9, 0.25 - 1e-9, 0.25, 0.25]] * 4),
    ),
    "p tiny where q is large": (markov([[1e-300, 1.0]] * 2), markov([[1.0, 1e-300]] * 2)),
}
RULES: dict[str, Rule] = {
    "residual": residual_rule,
    "block": block_rule,
    "coupled": coupled_rule,
    "coupled over several blocks": partial(coupled_rule, block_length=2),
}


@pytest.mark.parametrize("draft_length", [1, 2, 3, 4])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", ["block", "coupled", "coupled over several blocks"])
def test_every_law_keeps_the_joint_law_of_the_target(rule: str, pair: str, draft_length: int) -> None:
    target, draft = PAIRS[pair]
    speculative = joint_law(target, draft, RULES[rule], draft_length=draft_length, positions=POSITIONS)
    assert total_variation(speculative, plain_law(target, positions=POSITIONS)) <= EXACT


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", RULES)
def test_the_outcomes_of_a_rule_are_a_law(rule: str, pair: str) -> None:
    target, draft = PAIRS[pair]
    for proposals in plain_law(draft, positions=2):
        prefixes = [proposals[:i] for i in range(3)]
        outcomes = RULES[rule]([target(c) for c in prefixes], [draft(c) for c in prefixes[:2]], proposals)
        assert len(outcomes) == 3
        assert sum(outcome.probability for outcome in outcomes) == pytest.approx(1, abs=EXACT)
        for outcome in outcomes:
            assert sum(outcome.next_law) == pytest.approx(1, abs=EXACT)


def test_block_verification_with_the_residual_of_a_whole_p_is_caught() -> None:
    """ReLU(p - q) in place of ReLU(P p - q): the enumeration is fine enough to see what P is for."""

    def wrong(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
        right = block_rule(p_rows, q_rows, proposals)
        plain = residual_rule(p_rows, q_rows, proposals)
        return [o._replace(next_law=r.next_law) for o, r in zip(right, plain, strict=True)]

    target, draft = (markov(random_rows(seed, vocabulary_size=5)) for seed in (1, 2))
    biased = joint_law(target, draft, wrong, draft_length=2, positions=POSITIONS)
    assert total_variation(biased, plain_law(target, positions=POSITIONS)) > 1e-3


# Acceptance.


@pytest.mark.parametrize("draft_length", [1, 2, 3, 4])
@pytest.mark.parametrize("pair", PAIRS)
def test_block_never_accepts_less_than_residual(pair: str, draft_length: int) -> None:
    target, draft = PAIRS[pair]
    block, residual, coupled = (
        expected_accepted(target, draft, rule, draft_length=draft_length)
        for rule in (block_rule, residual_rule, coupled_rule)
    )
    assert block >= residual - EXACT
    assert residual >= coupled - EXACT
    if draft_length == 1:
        p, q = target(()), draft(())
        assert block == pytest.approx(acceptance_probability(p, q), abs=EXACT)


def test_block_accepts_more_than_residual_where_a_surplus_can_be_carried_over() -> None:
    target, draft = PAIRS["random"]
    block, residual = (expected_accepted(target, draft, rule, draft_length=4) for rule in (block_rule, residual_rule))
    assert block > residual * 1.005


@pytest.mark.parametrize("draft_length", [1, 2, 4])
def test_with_point_masses_block_has_nothing_to_gain(draft_length: int) -> None:
    """A proposal that was not drawn is kept as often as the target emits it, by either rule, prefix for prefix."""
    target, draft = PAIRS["q is a point mass"]
    (proposals,) = plain_law(draft, positions=draft_length)
    prefixes = [proposals[:i] for i in range(draft_length + 1)]
    p_rows, q_rows = [target(c) for c in prefixes], [draft(c) for c in prefixes[:-1]]
    block, residual = (
        [outcome.probability for outcome in rule(p_rows, q_rows, proposals)] for rule in (block_rule, residual_rule)
    )
    assert block == pytest.approx(residual, abs=EXACT)


@pytest.mark.parametrize("draft_length", [1, 3, 4])
def test_alike_proposals_give_leviathans_number_of_tokens(draft_length: int) -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    accepted = expected_accepted(lambda _: p, lambda _: q, residual_rule, draft_length=draft_length)
    a = acceptance_probability(p, q)
    assert accepted + 1 == pytest.approx(expected_tokens(a, draft_length), abs=EXACT)
    assert expected_tokens(a, draft_length) == pytest.approx((1 - a ** (draft_length + 1)) / (1 - a), abs=EXACT)
    assert expected_tokens(1.0, draft_length) == draft_length + 1


# Decisions.


def counted_steps(p_rows: list[Law], q_rows: list[Law], proposals: Tokens) -> dict[Tokens, float]:
    """block_step over a grid of 24^2 acceptance uniforms and 32 draws."""
    grid = [(i + 0.5) / 24 for i in range(24)]
    counted: dict[Tokens, float] = {}
    for u in itertools.product(grid, repeat=len(proposals)):
        for v in range(32):
            draw = partial(inverse_cdf, uniforms=(0.0, (v + 0.5) / 32))
            step = block_step(p_rows, q_rows, proposals, accept_uniforms=u, draw=draw)
            counted[step] = counted.get(step, 0.0) + 1 / (24 ** len(proposals) * 32)
    return counted


def test_decisions_of_block_over_a_grid_of_uniforms_have_the_law_of_the_rule() -> None:
    p_rows: list[Law] = [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.2, 0.4, 0.4]]
    q_rows: list[Law] = [[0.25, 0.75, 0.0], [0.3, 0.1, 0.6]]
    exact: dict[Tokens, float] = {
        (n, token): outcome.probability * probability
        for n, outcome in enumerate(block_rule(p_rows, q_rows, (1, 2)))
        for token, probability in enumerate(outcome.next_law)
    }
    assert total_variation(counted_steps(p_rows, q_rows, (1, 2)), exact) < 0.05  # the grid's resolution


def test_block_keeps_a_prefix_whose_own_test_failed_if_a_longer_one_passes() -> None:
    """The mark of block verification: x_1 alone would have been rejected, x_1 x_2 is kept."""
    p_rows: list[Law] = [[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]
    q_rows: list[Law] = [[1.0, 0.0], [0.1, 0.9]]
    h = block_acceptance(p_rows, q_rows, (0, 0))
    assert h == pytest.approx([0.35 / 0.85, 1.0])
    step = partial(block_step, p_rows, q_rows, (0, 0), draw=lambda weights: 1)
    assert step(accept_uniforms=[0.9, 0.99]) == (2, 1)
    assert residual_step(p_rows, q_rows, (0, 0), accept_uniforms=[0.9, 0.99], draw=lambda w: 1) == (0, 1)


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_UNIFORM])
def test_a_token_of_probability_zero_is_neither_accepted_nor_drawn(uniform: float) -> None:
    p_rows: list[Law] = [[0.0, 0.5, 0.5, 0.0]] * 3
    draw = partial(inverse_cdf, uniforms=(uniform, uniform))
    for proposals in ([0], [0, 1]):
        q_rows: list[Law] = [[0.5, 0.5, 0.0, 0.0]] * len(proposals)
        uniforms = [uniform] * len(proposals)
        n, token = block_step(p_rows, q_rows, proposals, accept_uniforms=uniforms, draw=draw)
        assert (n, token) == (0, 2)
        n, token = points_step(p_rows, proposals, accept_uniforms=uniforms, draw=draw)
        assert n == 0
        assert token in (1, 2)


def test_points_accept_with_the_probability_of_the_target_and_never_draw_what_they_rejected() -> None:
    p_rows: list[Law] = [[0.25, 0.25, 0.5], [0.1, 0.2, 0.7]]
    draw = partial(inverse_cdf, uniforms=(0.0, 0.0))
    assert points_step(p_rows, [0], accept_uniforms=[0.2], draw=draw) == (1, 0)
    assert points_step(p_rows, [0], accept_uniforms=[0.25], draw=draw) == (0, 1)


# The race.


@pytest.mark.parametrize("block_length", [1, 2, 64])
@pytest.mark.parametrize("pair", PAIRS)
def test_two_races_of_one_noise_have_the_laws_that_they_draw_from(pair: str, block_length: int) -> None:
    p, q = (table(()) for table in PAIRS[pair])
    joint = [[joint_race(p, q, y, x, block_length=block_length) for x in range(len(q))] for y in range(len(p))]
    assert [sum(row) for row in joint] == pytest.approx(list(p), abs=EXACT)
    assert [sum(column) for column in zip(*joint, strict=True)] == pytest.approx(list(q), abs=EXACT)
    matches = sum(joint[x][x] for x in range(len(p)))
    assert match_probability(p, q, block_length=block_length) == pytest.approx(matches, abs=EXACT)
    best = acceptance_probability(p, q)
    assert best / (2 - best) - EXACT <= matches <= best + EXACT or 1 < block_length < len(p)


def test_races_of_random_exponentials_meet_as_often_as_the_formula_says() -> None:
    rng = random.Random(14)
    p, q, runs = [0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2], 40_000
    counts: dict[Tokens, float] = {}
    for _ in range(runs):
        arrivals = [rng.expovariate(1) for _ in p]
        pair = tuple(min(range(4), key=lambda i, law=law: arrivals[i] / law[i]) for law in (p, q))  # type: ignore[misc]
        counts[pair] = counts.get(pair, 0.0) + 1 / runs
    exact: dict[Tokens, float] = {(y, x): joint_flat_race(p, q, y, x) for y in range(4) for x in range(4)}
    assert sum(exact.values()) == pytest.approx(1, abs=EXACT)
    assert total_variation(counts, exact) < 0.01


def test_keyed_draws_are_a_function_of_keys_and_position_and_follow_the_law() -> None:
    law, keys = random_law(random.Random(15), 130), (123456789, 987654321)
    assert [keyed_draw(law, keys, n) for n in range(50)] == [keyed_draw(law, keys, n) for n in range(50)]
    assert [keyed_draw(law, keys, n) for n in range(50)] != [keyed_draw(law, keys, n + 50) for n in range(50)]
    assert [keyed_draw(law, keys, n) for n in range(50)] != [keyed_draw(law, (1, 2), n) for n in range(50)]
    peaked = [0.9 if x == 100 else 0.1 / 129 for x in range(130)]
    hits = sum(keyed_draw(peaked, keys, n) == 100 for n in range(1000))
    assert 860 < hits < 940  # four standard deviations


def test_coupled_emits_the_targets_choices_up_to_the_first_that_differs() -> None:
    assert coupled_step([5, 6, 7], [5, 6]) == (2, 7)
    assert coupled_step([5, 6, 7], [5, 9]) == (1, 6)
    assert coupled_step([5], []) == (0, 5)
