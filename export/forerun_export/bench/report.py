"""Everything that one benchmark found, for programs. Tables and pictures are made from it."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from forerun_export.bench.engines import Engine
from forerun_export.bench.measuring import Measured, Settings
from forerun_export.bench.prediction import Prediction, prediction
from forerun_export.bench.summaries import Summary, acceptance_by_position, summary
from forerun_export.bench.time_split import TimeSplit, time_split

ALL = "all"
"""The name of all categories together, in reports."""


@dataclass(frozen=True)
class SweepPoint:
    """Speed-up of a draft at a fixed K in a category, and what Leviathan's formula says; 1 at K = 0, by definition."""

    category: str
    draft: str
    draft_length: int
    found: Prediction
    acceptance: Sequence[float] | None

    def to_json(self) -> dict[str, Any]:
        """As an object of the report's JSON."""
        return {
            "category": self.category,
            "draft": self.draft,
            "draft_length": self.draft_length,
            "predicted": self.found.predicted,
            "observed": self.found.observed and self.found.observed.to_json(),
            "tokens_per_target_call": self.found.tokens,
            "acceptance_by_position": self.acceptance and list(self.acceptance),
        }


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """One benchmark. `notes` are what a reader must know to judge the figures."""

    directory: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Settings
    engines: Sequence[Engine]
    measured: Measured
    prompts: int
    notes: Sequence[str]
    seconds: float

    @cached_property
    def categories(self) -> list[str]:
        """In the order of the prompts; all together at the end, where there are several."""
        found = list(dict.fromkeys(run.category for run in sorted(self.measured.runs, key=lambda run: run.prompt)))
        return [*found, ALL] if len(found) > 1 else found

    @property
    def shown(self) -> list[Engine]:
        """The engines that are bars: not those of the sweep."""
        return [engine for engine in self.engines if not engine.swept]

    @cached_property
    def summaries(self) -> dict[tuple[str, str], Summary]:
        """By category and engine."""
        found = {}
        for category in self.categories:
            for engine in self.shown:
                if one := summary(engine, self.measured, self.settings, _only(category)):
                    found[category, engine.name] = one
        return found

    @cached_property
    def predictions(self) -> dict[tuple[str, str], Prediction]:
        """By category and engine, for those of forerun that draft."""
        found = {}
        for category in self.categories:
            for engine in self.shown:
                if one := prediction(engine, self.measured, _only(category)):
                    found[category, engine.name] = one
        return found

    @cached_property
    def time_splits(self) -> dict[tuple[str, str], TimeSplit]:
        """By category and engine, for those of forerun."""
        found = {}
        for category in self.categories:
            for engine in self.shown:
                if one := time_split(engine, self.measured, _only(category)):
                    found[category, engine.name] = one
        return found

    @cached_property
    def prefill_s(self) -> dict[str, float]:
        """Seconds until the first token behind a long prompt, by engine; the median."""
        readings = self.measured.readings
        return {
            name: statistics.median(one.seconds for one in readings if one.engine == name)
            for name in dict.fromkeys(one.engine for one in readings)
        }

    @cached_property
    def sweep(self) -> list[SweepPoint]:
        """Every fixed K, by category and draft."""
        return list(self._sweep())

    def _sweep(self) -> Iterator[SweepPoint]:
        for category in self.categories:
            for engine in self.engines:
                if engine.swept and (one := prediction(engine, self.measured, _only(category))):
                    kept = acceptance_by_position(self.measured.of(engine.name, _only(category)))
                    yield SweepPoint(category, engine.draft, engine.draft_length or 0, one, kept)

    @property
    def failed(self) -> dict[Engine, str]:
        """The engines that are missing or incomplete, with the reason; a draft that is not there is told once."""
        reasons = self.measured.failed
        return {
            engine: reasons[engine.name]
            for engine in self.engines
            if engine.name in reasons and not (engine.swept and f"forerun-{engine.draft}" in reasons)
        }

    @property
    def lossless(self) -> bool:
        """Whether no engine of forerun, nor any of the sweep, was seen to change a token."""
        ours = [engine for engine in self.engines if engine.is_forerun]
        found = [summary(engine, self.measured, self.settings) for engine in ours]
        return not any(one.lossless.status == "differs" for one in found if one)

    def label(self, engine: Engine) -> str:
        """Its name in tables, with the setting that it found to be its best where it looked for one."""
        profile = self.measured.profiles.get(engine.worker) or {}
        best = profile.get("setting")
        return f"{engine.label}, {best}" if best else engine.label

    def shares_process(self, engine: Engine) -> bool:
        """Whether its process runs another bar as well, so that its peak memory is that of both."""
        return any(other.worker == engine.worker for other in self.shown if other.name != engine.name)

    def to_json(self) -> dict[str, Any]:
        """The object that is the last line of `forerun bench`."""
        return {
            "directory": self.directory,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "settings": {**asdict(self.settings), "law": self.settings.law_name, "prompts": self.prompts},
            "engines": [self._engine_json(engine) for engine in self.shown],
            "categories": [
                {
                    "category": category,
                    "engines": [one.to_json() for (place, _), one in self.summaries.items() if place == category],
                }
                for category in self.categories
            ],
            "predictions": [{"category": category, **one.to_json()} for (category, _), one in self.predictions.items()],
            "time_splits": [{"category": category, **one.to_json()} for (category, _), one in self.time_splits.items()],
            "prefill": [
                {"engine": name, "tokens": self.settings.prefill_tokens, "seconds": seconds, "tokens_per_s": rate}
                for name, seconds in self.prefill_s.items()
                for rate in [self.settings.prefill_tokens / seconds]
            ],
            "sweep": [point.to_json() for point in self.sweep],
            "failed": {engine.name: reason for engine, reason in self.failed.items()},
            "lossless": self.lossless,
            "groups": self.measured.groups,
            "others_shares": self.measured.others_shares,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
        }

    def _engine_json(self, engine: Engine) -> dict[str, Any]:
        loaded = self.measured.loaded.get(engine.worker)
        return {
            "name": engine.name,
            "label": engine.label,
            "available": bool(self.measured.of(engine.name)),
            "reason": self.measured.failed.get(engine.name),
            "draft": engine.draft if engine.is_forerun or engine.draft != "none" else None,
            "draft_length": engine.draft_length,
            "load_s": loaded and loaded.load_s,
            "load_peak_bytes": loaded and loaded.load_peak_bytes,
            "peak_bytes": self.measured.peak_bytes.get(engine.worker),
            "shares_process": self.shares_process(engine),
            "profile": self.measured.profiles.get(engine.worker),
        }


def _only(category: str) -> str | None:
    return None if category == ALL else category
