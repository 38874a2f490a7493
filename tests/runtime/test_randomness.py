"""Uniform numbers that are a function of (seed, stream, position, index)."""

import itertools
import math

import pytest

from forerun.randomness import SEED_BITS, Stream, fresh_seed, uniforms


def test_numbers_depend_on_their_key_alone() -> None:
    first = uniforms(7, Stream.DRAFT, 3, 1, 2)
    uniforms(8, Stream.DRAW, 5, 0, 16)
    assert uniforms(7, Stream.DRAFT, 3, 1, 2) == first


def test_known_numbers_stay_the_same_on_every_platform_and_in_every_version() -> None:
    # A seed that a user has written down must go on giving the same text.
    assert [number * 2**23 for number in uniforms(1, Stream.DRAFT, 2, 3, 2)] == [8179871, 2982588]
    assert [number * 2**23 for number in uniforms(2**64 - 1, Stream.DRAW, 10**6, 0, 2)] == [6436632, 1379039]


def test_no_two_keys_share_a_number() -> None:
    keys = itertools.product((0, 1, 2**63), Stream, (0, 1, 2, 300), (0, 1, 2, 300))
    pairs = [tuple(uniforms(*key, 2)) for key in keys]
    assert len(set(pairs)) == len(pairs)


def test_numbers_are_multiples_of_two_to_the_minus_23_below_one() -> None:
    numbers = [number for seed in range(500) for number in uniforms(seed, Stream.ACCEPT, 0, 0, 16)]
    assert all((number * 2**23).is_integer() and 0 <= number < 1 for number in numbers)


def test_up_to_sixteen_numbers_come_at_once() -> None:
    assert [len(uniforms(0, Stream.DRAW, 0, 0, count)) for count in range(1, 17)] == list(range(1, 17))


@pytest.mark.parametrize("vary", ["seed", "position", "index", "place"])
def test_numbers_are_uniform_and_independent_along_every_part_of_the_key(vary: str) -> None:
    size, cells = 20_000, 10
    if vary == "place":
        numbers = [u for seed in range(size // 16) for u in uniforms(seed, Stream.DRAFT, 0, 0, 16)]
    else:
        keys = {"seed": 1, "position": 1, "index": 1}
        numbers = []
        for value in range(size):
            keys[vary] = value
            numbers += uniforms(keys["seed"], Stream.DRAFT, keys["position"], keys["index"], 1)
    pairs = [(int(a * cells), int(b * cells)) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
    expected = len(pairs) / cells**2
    observed = [pairs.count(cell) for cell in itertools.product(range(cells), repeat=2)]
    statistic = sum((count - expected) ** 2 / expected for count in observed)
    degrees = cells**2 - 1
    assert abs(statistic - degrees) < 4 * math.sqrt(2 * degrees)


def test_fresh_seeds_differ_and_are_valid() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**SEED_BITS for seed in seeds)
