"""Tests of counts against a law, and how small a bias they see."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

LEAST_EXPECTED = 5.0
SIGNIFICANCE = 1e-4
POWER = 0.99

_NORMAL = NormalDist()


class Cell(NamedTuple):
    """A bin: how often it was hit, and how often the law says."""

    observed: float
    expected: float


def merged_cells(counts: Mapping[int, int], law: Sequence[float]) -> list[Cell]:
    """Bins of expected count 5 or more: likely tokens one each, the others together, or with one of them if too few.

    Tokens that the law rules out have a bin of expected count 0.
    """
    ruled_out = sum(count for x, count in counts.items() if not law[x])
    total = sum(counts.values())
    cells = [Cell(counts.get(x, 0), total * p) for x, p in enumerate(law) if total * p >= LEAST_EXPECTED]
    others = total - ruled_out - sum(cell.observed for cell in cells)
    rest = Cell(others, total - math.fsum(cell.expected for cell in cells))
    if rest.expected >= LEAST_EXPECTED:
        cells.append(rest)
    elif cells and (rest.observed or rest.expected):
        last = cells.pop()
        cells.append(Cell(last.observed + rest.observed, last.expected + rest.expected))
    return [*cells, Cell(ruled_out, 0.0)] if ruled_out else cells


def _log(observed: float, expected: float) -> float:
    return math.log(observed / expected) if expected else math.inf


@dataclass(frozen=True)
class GTest:
    """The G statistic of several independent tables of counts together, and its degrees of freedom."""

    statistic: float
    degrees: int
    samples: int

    @classmethod
    def of(cls, tables: Sequence[Sequence[Cell]]) -> "GTest":
        """2 sum O log(O/E), summed over tables of two bins or more."""
        useful = [cells for cells in tables if len(cells) > 1]
        g = 2 * math.fsum(
            cell.observed * _log(cell.observed, cell.expected) for cells in useful for cell in cells if cell.observed
        )
        degrees = sum(len(cells) - 1 for cells in useful)
        return cls(g, degrees, int(sum(cell.observed for cells in useful for cell in cells)))

    @property
    def p_value(self) -> float:
        """The chance of a fit as bad as this under the law."""
        return chi_square_tail(self.statistic, self.degrees) if self.degrees else 1.0

    @property
    def smallest_bias(self) -> float:
        """The total variation, over bins and on average over tables, from which on any bias is caught with 99% power.

        A bias d gives the statistic the noncentrality N sum d^2/p, and sum d^2/p >= 4 TV^2 by Cauchy and Schwarz.
        """
        if not self.degrees:
            return 1.0
        return min(1.0, math.sqrt(needed_noncentrality(self.degrees) / self.samples) / 2)


def chi_square_tail(statistic: float, degrees: int, noncentrality: float = 0.0) -> float:
    """P(X > statistic) of a chi-square, by the nearly normal law of a power of it (Sankaran 1959, third formula).

    Without noncentrality the power is the cube root, and the formula that of Wilson and Hilferty 1931.
    """
    mean, twice = degrees + noncentrality, degrees + 2 * noncentrality
    power = 1 - 2 * mean * (degrees + 3 * noncentrality) / (3 * twice**2)
    spread = twice / mean**2
    skew = (power - 1) * (1 - 3 * power)
    centre = 1 + power * spread * (power - 1 - (2 - power) * skew * spread / 2)
    deviation = power * math.sqrt(2 * spread) * (1 + skew * spread / 2)
    z = ((max(statistic, 0.0) / mean) ** power - centre) / deviation
    return math.erfc(z / math.sqrt(2)) / 2


def critical_value(degrees: int) -> float:
    """What the statistic exceeds with probability SIGNIFICANCE under the law."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + _NORMAL.inv_cdf(1 - SIGNIFICANCE) * math.sqrt(spread)) ** 3


def needed_noncentrality(degrees: int) -> float:
    """The noncentrality at which the test refuses with probability POWER."""
    critical, low, high = critical_value(degrees), 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(critical, degrees, middle) < POWER else (low, middle)
    return high


class ScoreTest(NamedTuple):
    """The most powerful test of a small bias in one known direction, from p toward a biased law b.

    z: the score in standard deviations; `smallest_share`: the share of b mixed into p that is caught with 99% power.
    `variation`: the total variation between p and b.
    """

    z: float
    smallest_share: float
    variation: float

    @property
    def p_value(self) -> float:
        """One-sided."""
        return math.erfc(self.z / math.sqrt(2)) / 2


def score_test(
    counts: Sequence[Mapping[int, int]], laws: Sequence[Sequence[float]], biased: Sequence[Sequence[float]]
) -> ScoreTest:
    """The score sum (b(x) - p(x)) / p(x) over the drawn tokens of all tables, and what it can tell.

    Under p it has mean 0 and variance N sum (b - p)^2 / p; a share e of b moves the mean by e times that variance.
    """
    score = variance = variation = samples = 0.0
    for drawn, p, b in zip(counts, laws, biased, strict=True):
        total = sum(drawn.values())
        score += math.fsum(count * (b[x] - p[x]) / p[x] for x, count in drawn.items() if p[x])
        variance += total * math.fsum((b_x - p_x) ** 2 / p_x for b_x, p_x in zip(b, p, strict=True) if p_x)
        variation += total * math.fsum(abs(b_x - p_x) for b_x, p_x in zip(b, p, strict=True)) / 2
        samples += total
    needed = _NORMAL.inv_cdf(1 - SIGNIFICANCE) + _NORMAL.inv_cdf(POWER)
    spread = math.sqrt(variance)
    if not spread:
        return ScoreTest(0.0, math.inf, 0.0)
    return ScoreTest(score / spread, needed / spread, variation / samples)
