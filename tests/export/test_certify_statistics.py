"""The tests of counts behind a certificate: their sizes, and that the power they state is the power they have."""

import itertools
from collections import Counter

import numpy as np
import pytest

from forerun.oracle import block_step, inverse_cdf, one_hot, residual_step
from forerun_export.certify.margins import (
    block_margin,
    draw_margin,
    race_margin,
    residual_margin,
)
from forerun_export.certify.rule_mutants import shared_noise
from forerun_export.certify.statistics import (
    SIGNIFICANCE,
    GTest,
    chi_square_tail,
    critical_value,
    merged_cells,
    needed_noncentrality,
    score_test,
)

P = [0.5, 0.3, 0.2]
Q = [0.2, 0.3, 0.5]


def counts(rng: np.random.Generator, law: np.ndarray, samples: int) -> Counter[int]:
    return Counter(dict(enumerate(rng.multinomial(samples, law).tolist())))


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"), [(124.342, 100, 0.05), (149.449, 100, 0.001), (18.307, 10, 0.05)]
)
def test_the_tail_of_chi_square_is_that_of_the_tables(statistic: float, degrees: int, tail: float) -> None:
    assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=0.05)


@pytest.mark.parametrize("degrees", [4, 30, 200])
def test_the_critical_value_is_exceeded_as_rarely_as_it_says(degrees: int) -> None:
    assert chi_square_tail(critical_value(degrees), degrees) == pytest.approx(SIGNIFICANCE, rel=1e-6)


@pytest.mark.parametrize("degrees", [4, 30, 200])
def test_the_needed_noncentrality_gives_the_power_in_simulation(degrees: int) -> None:
    rng = np.random.default_rng(degrees)
    drawn = rng.noncentral_chisquare(degrees, needed_noncentrality(degrees), 40_000)
    assert (drawn > critical_value(degrees)).mean() == pytest.approx(0.99, abs=0.003)


def test_merged_cells_lose_no_count_and_no_probability() -> None:
    law = [0.5, 0.3, 0.19, 0.005, 0.005]
    cells = merged_cells({0: 50, 2: 40, 3: 10}, law)
    assert sum(cell.observed for cell in cells) == 100
    assert sum(cell.expected for cell in cells) == pytest.approx(100)
    assert all(cell.expected >= 5 for cell in cells)


def test_a_token_that_the_law_rules_out_shows() -> None:
    cells = merged_cells({0: 500, 1: 400, 2: 100}, [0.55, 0.45, 0.0])
    assert GTest.of([cells]).p_value < SIGNIFICANCE


def test_any_bias_of_the_stated_size_is_refused_in_simulation() -> None:
    """The least visible one: half of the mass grows by a factor, the other half shrinks."""
    rng, samples = np.random.default_rng(1), 5_000
    law = np.full(20, 1 / 20)
    smallest = GTest.of([merged_cells(counts(rng, law, samples), law.tolist())]).smallest_bias
    biased = law * (1 + 2 * smallest * np.where(np.arange(20) % 2, 1, -1))
    tests = [GTest.of([merged_cells(counts(rng, biased, samples), law.tolist())]) for _ in range(400)]
    assert sum(test.p_value < SIGNIFICANCE for test in tests) >= 380


def test_the_score_test_sees_the_stated_share_of_a_known_bias_in_simulation() -> None:
    rng, samples = np.random.default_rng(2), 5_000
    p, b = np.array(P), np.array([0.35, 0.39, 0.26])
    share = score_test([counts(rng, p, samples)], [p.tolist()], [b.tolist()]).smallest_share
    assert share < 1
    mixed = (1 - share) * p + share * b
    tests = [score_test([counts(rng, mixed, samples)], [p.tolist()], [b.tolist()]) for _ in range(400)]
    assert sum(test.p_value < SIGNIFICANCE for test in tests) >= 380


UNIFORMS = (0.0, 0.1, 0.35, 0.55, 0.8, 0.99)


@pytest.mark.parametrize(("step", "margin"), [(residual_step, residual_margin), (block_step, block_margin)])
def test_the_oracles_own_decision_has_no_margin_and_far_ones_are_not_explained(step: object, margin: object) -> None:
    p_rows, q_rows = [P, [0.1, 0.6, 0.3], Q], [Q, [0.5, 0.25, 0.25]]
    explained = 0
    for proposals in itertools.product(range(3), repeat=2):
        for u, v, w in itertools.product(UNIFORMS, repeat=3):
            pair = (0.5, w)
            decided = step(  # type: ignore[operator]
                p_rows, q_rows, proposals, accept_uniforms=(u, v), draw=lambda law, pair=pair: inverse_cdf(law, pair)
            )
            for decision in itertools.product(range(3), range(3)):
                found = margin(p_rows, q_rows, proposals, (u, v), pair, decision)  # type: ignore[operator]
                if decision == decided:
                    assert found.margin == 0
                else:
                    explained += found.explained
    # Some uniforms lie on an edge, where either side is right: u = p/q, or w = a sum of probabilities.
    assert explained <= 9 * len(UNIFORMS) ** 3 * 0.05


def test_a_token_of_weight_zero_is_never_explained() -> None:
    assert not draw_margin([0.5, 0.0, 0.5], (0.0, 0.5), 1).explained
    assert not race_margin(one_hot(0, 3), (1, 2), 3, 1).explained


def test_noise_that_is_shared_gives_the_law_of_a_simulation() -> None:
    """The mutant as a rule, against uniforms used twice."""
    rng = np.random.default_rng(3)
    u, accept = rng.random(200_000), rng.random(200_000)
    x = np.searchsorted(np.cumsum(Q), u, side="right").clip(0, 2)
    left = np.maximum(np.array(P) - Q, 0)
    correction = np.searchsorted(np.cumsum(left / left.sum()), u, side="right").clip(0, 2)
    kept = accept * np.array(Q)[x] < np.array(P)[x]
    simulated = np.bincount(np.where(kept, x, correction), minlength=3) / len(u)
    exact = np.zeros(3)
    for token, q in enumerate(Q):
        rejected, accepted = shared_noise([P, P], [Q], (token,))
        exact += q * rejected.probability * np.array(rejected.next_law)
        exact[token] += q * accepted.probability
    assert simulated == pytest.approx(exact, abs=0.005)
