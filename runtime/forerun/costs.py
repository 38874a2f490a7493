"""What the calls of a round take on this machine: measured once, then kept beside the user's other caches."""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import platformdirs

from forerun.schema import SchemaError, parse

MEASURED_TOKENS = (1, 2, 3, 5, 8, 12, 17, 24)
REPEATS = 4
"""Timed calls of each kind after one that warms up; the kinds take turns, so that a busy moment falls on all."""


@dataclass(frozen=True)
class Curve:
    """Seconds of a call by its number of tokens: linear between what was measured and, with the last slope, beyond."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.seconds) or list(self.tokens) != sorted(set(self.tokens)):
            raise SchemaError(["tokens: expected ascending numbers, and as many seconds"])

    def __call__(self, tokens: int) -> float:
        """Seconds of a call with so many tokens."""
        if len(self.tokens) == 1:
            return self.seconds[0]
        after = min(max(bisect.bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        low, high = self.tokens[after - 1], self.tokens[after]
        low_s, high_s = self.seconds[after - 1], self.seconds[after]
        slope = max(high_s - low_s, 0.0) / (high - low)
        return low_s + slope * max(tokens - low, 0)


class RoundShape(NamedTuple):
    """What the time of a round depends on: steps of the draft model, and proposals of the row that has most of them."""

    rows: int
    steps: int
    width: int
    samples: bool


@dataclass(frozen=True)
class Costs:
    """Seconds of a round's parts, by the tokens of all rows together.

    target, draft: one call of the model. draw, accept: what turns logits into a proposal, and proposals into a
    verdict; at temperature 0 and above it.
    """

    target: Curve
    draft: Curve | None
    draw_greedy: Curve
    draw_sampled: Curve
    accept_greedy: Curve
    accept_sampled: Curve

    def target_s(self, tokens: int) -> float:
        """A call of the target."""
        return self.target(tokens)

    def draft_s(self, tokens: int) -> float | None:
        """A call of the draft model; None without one."""
        return None if self.draft is None else self.draft(tokens)

    def round_s(self, shape: RoundShape) -> float:
        """The draft model's steps, each with a draw, the target's call, and the verdict."""
        tokens = shape.rows * (shape.width + 1)
        accept_s = (self.accept_sampled if shape.samples else self.accept_greedy)(tokens)
        return self._propose_s(shape) + self.target(tokens) + accept_s

    def _propose_s(self, shape: RoundShape) -> float:
        if self.draft is None or shape.steps == 0:
            return 0.0
        draw_s = (self.draw_sampled if shape.samples else self.draw_greedy)(shape.rows)
        first_s = self.draft(2 * shape.rows)  # which takes two tokens a row, or about that of a head
        return first_s + (shape.steps - 1) * self.draft(shape.rows) + shape.steps * draw_s


class RunningCosts:
    """Costs, corrected by what rounds have taken: the machine may be busy, and contexts grow.

    Only ratios between shapes matter, so what slows every round alike corrects nothing.
    """

    GAIN, FADE, LARGEST_SURPRISE = 0.1, 0.995, 0.5

    def __init__(self, measured: Costs) -> None:
        self._measured = measured
        self._level = 0.0  # logarithm of the time that rounds take, over what was measured
        self._corrections: dict[tuple[int, int], float] = {}  # by steps and width: logarithms beyond the level
        self._known: dict[RoundShape, float] = {}  # asked for again and again, in every round

    def round_s(self, shape: RoundShape) -> float:
        """Seconds that a round of this shape is expected to take, where the machine is as it was measured."""
        correction = self._corrections.get((shape.steps, shape.width))
        return self._measured_s(shape) if correction is None else self._measured_s(shape) * math.exp(correction)

    def _measured_s(self, shape: RoundShape) -> float:
        if (seconds := self._known.get(shape)) is None:
            seconds = self._known[shape] = self._measured.round_s(shape)
        return seconds

    def observe(self, shape: RoundShape, seconds: float) -> None:
        """A round of this shape has taken `seconds`. What other shapes once took fades: it may have been chance."""
        key, limit = (shape.steps, shape.width), self.LARGEST_SURPRISE
        ratio = math.log(seconds / self._measured_s(shape))
        correction = self._corrections.get(key, 0.0)
        surprise = max(-limit, min(ratio - self._level - correction, limit))
        self._level += self.GAIN * max(-limit, min(ratio - self._level, limit))
        self._corrections = {other: value * self.FADE for other, value in self._corrections.items()}
        self._corrections[key] = correction + self.GAIN * surprise


Calls = Mapping[str, Mapping[int, Callable[[], None]]]
"""For each curve of `Costs`, calls by their number of tokens."""


def measure(calls: Calls) -> Costs:
    """Time every call; the fastest of `REPEATS`, which other work on the machine has disturbed least."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for repeat in range(REPEATS + 1):
        for name, by_tokens in calls.items():
            for tokens, call in by_tokens.items():
                started = time.perf_counter()
                call()
                if repeat:
                    seconds.setdefault((name, tokens), []).append(time.perf_counter() - started)
    curves = {
        name: Curve(
            tuple(sorted(by_tokens)),
            tuple(min(seconds[name, tokens]) for tokens in sorted(by_tokens)),
        )
        for name, by_tokens in calls.items()
    }
    return Costs(
        target=curves["target"],
        draft=curves.get("draft"),
        draw_greedy=curves["draw_greedy"],
        draw_sampled=curves["draw_sampled"],
        accept_greedy=curves["accept_greedy"],
        accept_sampled=curves["accept_sampled"],
    )


class CostFile:
    """Where the costs of an engine directory on this machine are kept; engine directories never change themselves.

    `identity` is whatever else the costs depend on.
    """

    def __init__(self, identity: Sequence[str]) -> None:
        known = json.dumps([*identity, *_machine()])
        name = hashlib.sha256(known.encode()).hexdigest()[:32]
        self.path = Path(platformdirs.user_cache_dir("forerun")) / "costs" / f"{name}.json"

    def read(self) -> Costs | None:
        """What was kept; None where nothing usable is."""
        try:
            return parse(Costs, json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, SchemaError):
            return None

    def write(self, costs: Costs) -> None:
        """Keep them. Where there is no place to write, they are measured again next time."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                json.dump(asdict(costs), file)
            os.replace(file.name, self.path)
        except OSError:
            return


def _machine() -> list[str]:
    """The processor and how much of it this process may use."""
    return [platform.machine(), platform.node(), _processor(), str(len(os.sched_getaffinity(0)))]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
