"""Rates with bootstrap intervals, percentiles, and how figures of single prompts spread."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval over prompts; no interval where there is one prompt only."""

    value: float
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As an object of the report's JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}


def bootstrap(rows: Sequence[Sequence[float]], statistic: Callable[[Doubles], Doubles]) -> Estimate | None:
    """A statistic of the sums of the columns, with the percentile interval of Efron 1979 over the rows.

    `rows` [n,c]: a prompt each. `statistic` maps sums [..,c] to values [..]. The resamples are always the same ones.
    None where the value is not finite, as without any row.
    """
    table = np.asarray(rows, dtype=np.float64)
    if not len(table):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(table.sum(axis=0)))
        chosen = np.random.default_rng(0).integers(len(table), size=(RESAMPLES, len(table)))
        resampled = statistic(table[chosen].sum(axis=1))
    if not np.isfinite(value):
        return None
    found = resampled[np.isfinite(resampled)]
    if len(table) < 2 or not len(found):
        return Estimate(value)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def rate(counts: Sequence[float], seconds: Sequence[float]) -> Estimate | None:
    """Counts per second of all prompts together."""
    return bootstrap(list(zip(counts, seconds, strict=True)), lambda sums: sums[..., 0] / sums[..., 1])


def speed_up(pairs: Sequence[tuple[float, float, float, float]]) -> Estimate | None:
    """How many times faster: (tokens, seconds) of the one over (tokens, seconds) of the other, prompt by prompt.

    Pairing takes the differences between prompts out of the interval.
    """
    return bootstrap(pairs, lambda sums: sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3]))


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which this share lies; None without values."""
    return float(np.quantile(values, share)) if len(values) else None


@dataclass(frozen=True)
class Spread:
    """What users see of a figure that each prompt has for itself, where a mean hides its bad cases.

    `median`: of two in the middle, halfway between. `lowest_decile`: of n values, counted from the lowest, number
    floor(0.1 (n - 1)) + 1, which is always that of some prompt, and the lowest of all where there are ten or fewer.
    """

    median: float
    lowest_decile: float
    lowest: float

    def to_json(self) -> dict[str, Any]:
        """As an object of the report's JSON."""
        return asdict(self)


def spread(values: Sequence[float]) -> Spread | None:
    """None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(statistics.median(ordered), ordered[(len(ordered) - 1) // 10], ordered[0])
