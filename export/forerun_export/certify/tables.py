"""Pairs of small language models for exact enumeration: random ones, and those that break rules which look right."""

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from forerun.oracle import Law, Table, Tokens, one_hot

Weights = list[float]
Maker = Callable[[random.Random, int], tuple[Weights, Weights]]
"""(random numbers, V) -> weights of p and of q at one context."""


@dataclass(frozen=True)
class Pair:
    """A target and a draft over V tokens; both depend on the whole context."""

    name: str
    vocabulary: int
    target: Table
    draft: Table


class Size(NamedTuple):
    """How far a pair is enumerated: V, K and the number of positions."""

    vocabulary: int
    draft_length: int
    positions: int


SIZES = (
    Size(2, 1, 4), Size(2, 2, 5), Size(2, 3, 5), Size(2, 4, 6),
    Size(3, 1, 4), Size(3, 2, 4), Size(3, 3, 3), Size(4, 2, 3), Size(3, 4, 3),
)  # fmt: skip


def _random(rng: random.Random, size: int) -> tuple[Weights, Weights]:
    return _weights(rng, size), _weights(rng, size)


def _zeros_in_p(rng: random.Random, size: int) -> tuple[Weights, Weights]:
    return _holes(rng, _weights(rng, size)), _weights(rng, size)


def _zeros_in_q(rng: random.Random, size: int) -> tuple[Weights, Weights]:
    return _weights(rng, size), _holes(rng, _weights(rng, size))


def _zeros_in_both(rng: random.Random, size: int) -> tuple[Weights, Weights]:
    return _holes(rng, _weights(rng, size)), _holes(rng, _weights(rng, size))


def _equal(rng: random.Random, size: int) -> tuple[Weights, Weights]:
    weights = _weights(rng, size)
    return weights, weights


def _disjoint(rng: random.Random, size: int) -> tuple[Weights, Weights]:
    of_p = [float(x % 2 == 0) for x in range(size)]
    p, q = _random(rng, size)
    return [w * one for w, one in zip(p, of_p, strict=True)], [w * (1 - one) for w, one in zip(q, of_p, strict=True)]


def _nearly_certain(rng: random.Random, size: int) -> tuple[Weights, Weights]:
    scales = (1.0, 1e-9, 1e-30)
    return (
        [w * rng.choice(scales) for w in _weights(rng, size)],
        [w * rng.choice(scales) for w in _weights(rng, size)],
    )


def _certain(rng: random.Random, size: int) -> tuple[Weights, Weights]:
    return list(one_hot(rng.randrange(size), size)), list(one_hot(rng.randrange(size), size))


def _point_proposals(rng: random.Random, size: int) -> tuple[Weights, Weights]:
    return _weights(rng, size), list(one_hot(rng.randrange(size), size))


MAKERS: dict[str, Maker] = {
    "random": _random,
    "zeros in p": _zeros_in_p,
    "zeros in q": _zeros_in_q,
    "zeros in both": _zeros_in_both,
    "q = p": _equal,
    "disjoint supports": _disjoint,
    "nearly certain": _nearly_certain,
}


def pairs(vocabulary: int, *, seeds: int) -> Iterator[Pair]:
    """A pair of every kind for each seed."""
    for seed in range(seeds):
        for name, make in MAKERS.items():
            yield make_pair(name, make, vocabulary, seed)


def point_pairs(vocabulary: int, *, seeds: int) -> Iterator[Pair]:
    """Drafts whose proposal follows from the context, as an n-gram's does."""
    for seed in range(seeds):
        yield make_pair("point proposals", _point_proposals, vocabulary, seed)


def certain_pairs(vocabulary: int, *, seeds: int) -> Iterator[Pair]:
    """Both at temperature 0."""
    for seed in range(seeds):
        yield make_pair("temperature 0", _certain, vocabulary, seed)


def make_pair(name: str, make: Maker, vocabulary: int, seed: int) -> Pair:
    """The pair whose laws `make` gives, context by context."""

    @functools.cache
    def laws(context: Tokens) -> tuple[Law, Law]:
        rng = random.Random(f"{name} {vocabulary} {seed} {context}")
        p, q = make(rng, vocabulary)
        return _law(p), _law(q)

    return Pair(name, vocabulary, lambda context: laws(context)[0], lambda context: laws(context)[1])


def _weights(rng: random.Random, size: int) -> Weights:
    return [rng.expovariate(1.0) ** rng.choice((1, 2)) for _ in range(size)]


def _holes(rng: random.Random, weights: Weights) -> Weights:
    kept = rng.randrange(len(weights))
    return [w if x == kept or rng.random() < 0.5 else 0.0 for x, w in enumerate(weights)]


def _law(weights: Weights) -> Law:
    total = sum(weights)
    return tuple(weight / total for weight in weights)
