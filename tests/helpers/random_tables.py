"""Random laws and tables for tests of the oracle."""

import random
from collections.abc import Sequence

from forerun.oracle import Law, Table


def random_law(rng: random.Random, vocabulary_size: int, *, zeros: float = 0.0) -> Law:
    weights = [rng.expovariate(1) ** 2 * (rng.random() >= zeros) for _ in range(vocabulary_size)]
    weights[rng.randrange(vocabulary_size)] += 0.1
    total = sum(weights)
    return [weight / total for weight in weights]


def markov(rows: Sequence[Law]) -> Table:
    return lambda context: rows[context[-1] if context else 0]
