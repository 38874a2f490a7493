"""The keyed noise of the graphs: the oracle's integers, good enough to draw with, and the same for draft and target.

Each statistical test names what it would catch: `WEAK` lists simpler noises that must fail it, or a share of bias.
Seeds are fixed, so a p-value below `REJECTED` is a defect and no accident.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import onnxruntime
import pytest
from onnxscript import FLOAT, INT64

from forerun.oracle import PRIME, coupled_step, exponential, keyed_draw, noise
from forerun_export.certify.statistics import chi_square_tail
from forerun_export.sampling.building_blocks import B, R, formula
from forerun_export.sampling.noise import exponential as arrivals_of
from forerun_export.sampling.noise import fifth_power, streams
from forerun_export.sampling.saving import sampling_model
from helpers.sampling import Array, session_of, uniforms
from helpers.stages import noise_keys, random_laws, run_session, run_stage

REJECTED = 1e-4
N = "N"

Noise = Callable[[Array, Array, Array], Array]
"""(keys [B,2], positions [B,R], index [N]) -> integers [B,R,N], of the second stage."""


@formula
def noise_of(noise_keys: INT64[B, 2], positions: INT64[B, R], index: INT64[N]) -> tuple[INT64[B, R, N], FLOAT[B, R, N]]:
    """The integers of the race within a block, and what they become."""
    left, right = streams(noise_keys, positions)
    number = fifth_power(fifth_power(index + left[:, :, 1:]) + right[:, :, 1:])
    arrival = arrivals_of(number)
    return number, arrival


@cache
def noise_session() -> onnxruntime.InferenceSession:
    return session_of(sampling_model(noise_of, 1))


def graph_numbers(keys: Array, positions: Array, index: Array) -> Array:
    """The noise of the graphs."""
    return run_session(noise_session(), {"noise_keys": keys, "positions": positions, "index": index})["number"]


def additive(keys: Array, positions: Array, index: Array) -> Array:
    """A counter in place of a permutation."""
    numbers: Array = (keys[:, :1, None] * 48271 + positions[..., None] * 69621 + index * 16807) % PRIME
    return numbers


def without_position(keys: Array, positions: Array, index: Array) -> Array:
    """Positions share their noise."""
    return graph_numbers(keys, positions * 0, index)


def without_seed(keys: Array, positions: Array, index: Array) -> Array:
    """Seeds share their noise."""
    return graph_numbers(keys * 0, positions, index)


def without_token(keys: Array, positions: Array, index: Array) -> Array:
    """Tokens share their noise."""
    return graph_numbers(keys, positions, index * 0)


def test_the_graph_makes_the_integers_of_the_oracle() -> None:
    rng = np.random.default_rng(0)
    keys = np.concatenate([noise_keys(rng, 6), [[0, 0], [PRIME - 1, PRIME - 1]]])
    positions = np.concatenate([rng.integers(0, 2**20, (8, 3)), [[0], [1], [PRIME - 1], [2**40]] * 2], axis=1)
    index = np.array([0, 1, 63, 2**17])
    found = graph_numbers(keys, positions, index)
    for b, r, i in np.ndindex(found.shape):
        key = (int(keys[b, 0]), int(keys[b, 1]))
        assert found[b, r, i] == noise(key, int(positions[b, r]), 1, int(index[i]))


def test_the_arrivals_are_the_oracles_to_float32_and_finite() -> None:
    rng = np.random.default_rng(1)
    feeds = {"noise_keys": noise_keys(rng, 40), "positions": np.arange(100)[None].repeat(40, 0), "index": np.arange(64)}
    outputs = run_session(noise_session(), feeds)
    numbers, arrivals = outputs["number"].ravel(), outputs["arrival"].ravel()
    expected = -np.log1p(-(numbers + 0.5) / PRIME)
    np.testing.assert_allclose(arrivals, expected, rtol=3e-6)
    assert arrivals.min() > 0
    assert exponential(0) == pytest.approx(0.5 / PRIME)
    assert math.isfinite(exponential(PRIME - 1))


def test_an_arrival_has_the_same_bits_wherever_in_a_tensor_it_stands() -> None:
    # onnxruntime's Log rounds the last few elements of a tensor otherwise than the others.
    rng = np.random.default_rng(4)
    feeds = {"noise_keys": noise_keys(rng, 3), "positions": np.arange(5)[None].repeat(3, 0), "index": np.arange(67)}
    arrivals = run_session(noise_session(), feeds)["arrival"]
    for b, r in np.ndindex(3, 5):
        alone = {"noise_keys": feeds["noise_keys"][[b]], "positions": [[r]]}
        for index in range(67):
            found = run_session(noise_session(), {**alone, "index": np.array([index])})["arrival"]
            assert found.item() == arrivals[b, r, index]


# How good the noise is.


def axes(source: Noise) -> dict[str, Array]:
    """Numbers [rows, 256] whose neighbours in a row differ in the token, the position or the seed alone."""
    rng = np.random.default_rng(2)
    keys, positions, tokens = noise_keys(rng, 1000), np.arange(256), np.arange(256)
    nearby = np.array([[12345, 67890]]) + np.arange(256)[:, None] * [[0, 1]]  # seeds that differ by one
    return {
        "token": source(keys, positions[:1][None].repeat(1000, 0), tokens)[:, 0],
        "position": source(keys, positions[None].repeat(1000, 0), tokens[:1])[..., 0],
        "seed": source(nearby, np.arange(1000)[None].repeat(256, 0), tokens[:1])[..., 0].T,
    }


def uniformity(numbers: Array) -> float:
    """Chi-square over 1024 equal bins."""
    return chi_square(np.bincount((numbers.ravel() * 1024) // PRIME, minlength=1024))


def low_digits(numbers: Array) -> float:
    """Chi-square of the remainders by 1021: low bits as good as high ones."""
    return chi_square(np.bincount(numbers.ravel() % 1021, minlength=1021))


def pairs(numbers: Array) -> float:
    """Chi-square over 32 x 32 bins of neighbours."""
    bins = (numbers * 32) // PRIME
    return chi_square(np.bincount((bins[:, 0::2] * 32 + bins[:, 1::2]).ravel(), minlength=1024))


def lagged(numbers: Array) -> float:
    """The strongest of the correlations at lags 1..16, Bonferroni's correction applied."""
    centred = numbers / PRIME - 0.5
    scores = [
        12 * (centred[:, lag:] * centred[:, :-lag]).sum() / math.sqrt(centred[:, lag:].size) for lag in range(1, 17)
    ]
    return min(1.0, 16 * math.erfc(max(map(abs, scores)) / math.sqrt(2)))


def maxima(numbers: Array) -> float:
    """Chi-square of the place of the largest number of each row: what decides a race."""
    return chi_square(np.bincount(numbers.argmax(-1) // 8, minlength=32))


def chi_square(counts: Array) -> float:
    mean = counts.mean()
    return two_sided(chi_square_tail(float(((counts - mean) ** 2 / mean).sum()), len(counts) - 1))


def two_sided(tail: float) -> float:
    """Too even is as bad as too uneven."""
    return 2 * min(tail, 1 - tail)


TESTS = [uniformity, low_digits, pairs, lagged, maxima]


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
@pytest.mark.parametrize("test", TESTS)
def test_the_noise_passes(test: Callable[[Array], float], axis: str) -> None:
    assert test(axes(graph_numbers)[axis]) > REJECTED


@pytest.mark.parametrize("test", [pairs, lagged, maxima])
def test_a_counter_in_its_place_fails(test: Callable[[Array], float]) -> None:
    assert min(test(numbers) for numbers in axes(additive).values()) < REJECTED


@pytest.mark.parametrize(
    ("weak", "axis"),
    [(without_token, "token"), (without_position, "position"), (without_seed, "seed")],
)
def test_leaving_out_what_the_noise_depends_on_is_caught(weak: Noise, axis: str) -> None:
    assert pairs(axes(weak)[axis]) < REJECTED


def test_the_tests_see_a_bias_of_three_percent() -> None:
    """Power: 256,000 numbers of which 3% are pulled into the lower half, or repeat their neighbour."""
    rng = np.random.default_rng(3)
    numbers = axes(graph_numbers)["token"]
    chosen = rng.random(numbers.shape) < 0.03
    assert uniformity(np.where(chosen, numbers // 2, numbers)) < REJECTED
    repeated = np.where(chosen, np.roll(numbers, 1, axis=1), numbers)
    assert pairs(repeated) < REJECTED
    assert lagged(repeated) < REJECTED


@pytest.mark.parametrize("changed", ["first key", "second key", "position", "token"])
def test_changing_one_bit_of_what_goes_in_changes_half_of_the_bits_that_come_out(changed: str) -> None:
    rng = np.random.default_rng(4)
    keys, positions, index = noise_keys(rng, 4000), rng.integers(0, 2**16, (4000, 1)), np.arange(64)
    before = graph_numbers(keys, positions, index)
    if changed == "token":
        after = before[..., index ^ 1]
    else:
        flip = 1 << rng.integers(0, 16, 4000)
        keys[:, 0] ^= flip * (changed == "first key")
        keys[:, 1] ^= flip * (changed == "second key")
        positions[:, 0] ^= flip * (changed == "position")
        after = graph_numbers(keys % PRIME, positions, index)
    differing = np.array([((before ^ after) >> bit & 1).mean() for bit in range(31)])
    assert np.abs(differing - 0.5).max() < 0.006  # six standard deviations of 256,000 coins


def test_as_many_numbers_coincide_as_among_random_ones() -> None:
    """200,000 of 2^31 - 1: 9.3 coincidences expected. A stream of 31 bits in all would show hundreds."""
    numbers = graph_numbers(np.array([[7, 11]]), np.arange(3125)[None], np.arange(64)).ravel()
    assert 1 <= len(numbers) - len(np.unique(numbers)) <= 25
    assert len(set(numbers.tolist())) > 199_900


def test_small_arrivals_are_as_frequent_as_they_should_be() -> None:
    """They decide which rare tokens win: 64,000 of 4 million below 2^-6, 62 below 2^-16."""
    rng = np.random.default_rng(5)
    feeds = {
        "noise_keys": noise_keys(rng, 250),
        "positions": np.arange(256)[None].repeat(250, 0),
        "index": np.arange(64),
    }
    arrivals = run_session(noise_session(), feeds)["arrival"].ravel()
    for bound in (2.0**-6, 2.0**-10, 2.0**-16):
        expected = -math.expm1(-bound) * arrivals.size
        assert abs((arrivals < bound).sum() - expected) < 4.5 * math.sqrt(expected)


# What the noise is for.


def drawn_with_noise(p: Array, keys: Array, positions: Array) -> Array:
    batch = len(p)
    return run_stage(
        "draw",
        p=p,
        uniforms=np.zeros((batch, 2)),
        coupled=np.ones(batch),
        noise_keys=keys,
        positions=positions,
    )["token"][:, 0]


@pytest.mark.parametrize("vocabulary_size", [1, 5, 64, 300, 5000])
def test_draw_takes_the_token_that_the_oracles_race_takes(vocabulary_size: int) -> None:
    rng, differing = np.random.default_rng(vocabulary_size), 0
    for _ in range(20):
        p, keys, positions = random_laws(rng, 4, 1, vocabulary_size), noise_keys(rng, 4), rng.integers(0, 999, (4, 1))
        drawn = drawn_with_noise(p, keys, positions)
        for b in range(4):
            expected = keyed_draw(p[b, 0].tolist(), (int(keys[b, 0]), int(keys[b, 1])), int(positions[b, 0]))
            differing += int(drawn[b]) != expected
    assert differing <= 1  # two arrivals within float32 of each other


@pytest.mark.parametrize("vocabulary_size", [5, 300, 5000])
def test_verification_emits_what_plain_decoding_draws_whatever_was_proposed(vocabulary_size: int) -> None:
    """Any draft, K and batch: token i of a round is the draw at its position, to the last token."""
    rng = np.random.default_rng(6)
    for draft_length in (1, 2, 5):
        p, keys = random_laws(rng, 4, draft_length + 1, vocabulary_size), noise_keys(rng, 4)
        positions = rng.integers(0, 999, (4, 1)) + np.arange(draft_length + 1)
        plain = np.stack(
            [drawn_with_noise(p[:, r : r + 1], keys, positions[:, r : r + 1]) for r in range(draft_length + 1)], 1
        )
        guesses = rng.integers(0, vocabulary_size, (4, draft_length))
        proposals = np.where(rng.random(guesses.shape) < 0.8, plain[:, :-1], guesses)
        valid = rng.integers(0, draft_length + 1, 4)
        outputs = run_stage(
            "verify-coupled",
            p=p,
            tokens=np.concatenate([np.zeros((4, 1)), proposals], axis=1),
            valid=valid,
            noise_keys=keys,
            positions=positions,
        )
        for b in range(4):
            expected = coupled_step(plain[b].tolist(), proposals[b, : valid[b]].tolist())
            assert (outputs["accepted"][b], outputs["next_token"][b]) == expected


def test_races_draw_from_the_law() -> None:
    """Power: 60,000 draws over 300 tokens; a law that is off by 5% here and there would be rejected."""
    rng = np.random.default_rng(7)
    p = random_laws(rng, 1, 1, 300)
    p[0, 0] = np.arange(1, 301) / np.arange(1, 301).sum()
    drawn = np.concatenate(
        [
            drawn_with_noise(p.repeat(3000, 0), noise_keys(rng, 3000), np.full((3000, 1), position))
            for position in range(20)
        ]
    )
    counts = np.bincount(drawn, minlength=300)

    def fit(law: Array) -> float:
        expected = law / law.sum() * counts.sum()
        return chi_square_tail(float(((counts - expected) ** 2 / expected).sum()), 299)

    assert fit(p[0, 0]) > REJECTED
    assert fit(p[0, 0] * (1 + 0.1 * (np.arange(300) % 2))) < REJECTED


def test_rows_that_are_not_coupled_do_not_feel_the_noise() -> None:
    rng = np.random.default_rng(8)
    p, pair = random_laws(rng, 2, 1, 300), uniforms(rng, 2, 2)
    tokens = {
        (coupled, position): run_stage(
            "draw",
            p=p,
            uniforms=pair,
            coupled=[coupled, False],
            noise_keys=[[1, 2], [3, 4]],
            positions=[[position], [position]],
        )["token"][1, 0]
        for coupled in (False, True)
        for position in range(5)
    }
    assert len(set(tokens.values())) == 1


def test_the_tokens_of_a_stream_are_those_of_its_row_alone() -> None:
    """Draws of a row have the same bits in any batch."""
    rng = np.random.default_rng(9)
    p, keys, positions = random_laws(rng, 6, 1, 1000), noise_keys(rng, 6), rng.integers(0, 99, (6, 1))
    together = drawn_with_noise(p, keys, positions)
    alone = [drawn_with_noise(p[b : b + 1], keys[b : b + 1], positions[b : b + 1])[0] for b in range(6)]
    assert together.tolist() == alone
