"""The runs themselves: every engine in turn for every prompt, so that what else the machine does hits all alike."""

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun_export.bench.disturbance import Disturbance
from forerun_export.bench.engines import Engine, Line
from forerun_export.bench.processes import Loaded, Worker, WorkerError, WorkerSpec, waves
from forerun_export.bench.runs import Output, Reading, Run, Task
from forerun_export.progress import Report, silent

WARM_UP_TOKENS = 16
READINGS = 3
"""How often each plain engine reads a long prompt: the median counts."""
SETTLE_S = 0.1
"""Pause before each run: a thread pool spins for some 50 ms behind its last task, on the next engine's processors."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The same for all engines. Prompt number i is sampled with the seed `seed` + i, where a seed does not fix K.

    `prefill_tokens` is the length of a prompt that plain engines are timed on while they read it; 0 leaves that out.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    law: str = "auto"
    seed: int = 0
    repeats: int = 1
    threads: int = 1
    prefill_tokens: int = 0

    @property
    def law_name(self) -> str:
        """The law of acceptance; a benchmark's seeds do not ask for `coupled`, as a request's would."""
        if self.temperature == 0:
            return "greedy"
        return "block" if self.law == "auto" else self.law


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt as token ids."""

    category: str
    tokens: tuple[int, ...]


@dataclass
class Measured:
    """What came of it.

    `failed` tells why an engine is missing, or missing from some prompt on; earlier runs stay. `others_shares`: of the
    processors, by group, what other processes took during its runs.
    """

    runs: list[Run] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, Loaded] = field(default_factory=dict)
    peak_bytes: dict[str, int | None] = field(default_factory=dict)
    profiles: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)
    others_shares: list[float | None] = field(default_factory=list)
    groups: int = 1

    def of(self, engine: str, category: str | None = None) -> list[Run]:
        """The runs of an engine, in one category or in all."""
        return [run for run in self.runs if run.engine == engine and category in (None, run.category)]


def measure(
    line: Line,
    prompts: Sequence[TokenPrompt],
    settings: Settings,
    *,
    available_bytes: int | None = None,
    report: Report = silent,
) -> Measured:
    """Run every engine on every prompt `repeats` times, after a warm-up.

    Workers that do not fit into memory together run in groups, one group after the other.
    """
    measured = Measured(failed=dict(line.unavailable))
    groups = waves(line.workers, available_bytes)
    measured.groups = len(groups)
    for group in groups:
        names = [spec.name for spec in group]
        engines = [engine for engine in line.engines if engine.worker in names]
        _Group(engines, prompts, settings, measured, report).run(group)
    return measured


class _Group:
    """Engines whose workers live at the same time."""

    def __init__(
        self,
        engines: Sequence[Engine],
        prompts: Sequence[TokenPrompt],
        settings: Settings,
        measured: Measured,
        report: Report,
    ) -> None:
        self._engines = engines
        self._prompts = prompts
        self._settings = settings
        self._measured = measured
        self._report = report
        self._workers: dict[str, Worker] = {}

    def run(self, specs: Sequence[WorkerSpec]) -> None:
        with contextlib.ExitStack() as stack:
            for number, spec in enumerate(specs):
                self._report("Loading engines", number, len(specs))
                self._load(stack.enter_context(Worker(spec, threads=self._settings.threads)))
            for number, engine in enumerate(self._engines):
                self._report("Warming up", number, len(self._engines))
                self._warm_up(engine)
            turns = list(self._turns())
            disturbance = Disturbance([worker.process.pid for worker in self._workers.values()])
            for number, (prompt, engine) in enumerate(turns):
                self._report("Measuring", number, len(turns))
                self._measure(prompt, engine)
            self._read()
            self._measured.others_shares.append(disturbance.share())
            for name, worker in self._workers.items():
                self._measured.peak_bytes[name] = worker.peak_bytes
                self._measured.profiles[name] = worker.profile

    def _load(self, worker: Worker) -> None:
        name = worker.spec.name
        try:
            self._measured.loaded[name] = worker.load()
            self._workers[name] = worker
        except WorkerError as error:
            self._measured.failed |= {engine.name: str(error) for engine in self._engines if engine.worker == name}

    def _turns(self) -> Iterator[tuple[int, Engine]]:
        """Prompt by prompt, all engines; each time another one begins."""
        count = len(self._engines)
        for turn in range(self._settings.repeats * len(self._prompts)):
            for place in range(count):
                yield turn % len(self._prompts), self._engines[(turn + place) % count]

    def _warm_up(self, engine: Engine) -> None:
        """A few tokens, which also show whether the engine can do what it is asked."""
        if engine.name not in self._measured.failed:
            task = self._task(0, engine, min(WARM_UP_TOKENS, self._settings.max_new_tokens))
            try:
                self._workers[engine.worker].decode(task)
            except WorkerError as error:
                self._measured.failed[engine.name] = str(error)

    def _measure(self, prompt: int, engine: Engine) -> None:
        asked = self._prompts[prompt]
        if output := self._decoded(engine, self._task(prompt, engine, self._settings.max_new_tokens)):
            self._measured.runs.append(Run(engine.name, asked.category, prompt, len(asked.tokens), output))

    def _read(self) -> None:
        """Plain engines in turn read long prompts, another one each time, for one token each."""
        count = self._settings.prefill_tokens
        engines = [engine for engine in self._engines if engine.is_plain]
        turns = [(begin, engine) for begin in range(READINGS if count else 0) for engine in engines]
        for number, (begin, engine) in enumerate(turns):
            self._report("Reading long prompts", number, len(turns))
            task = Task(tokens=long_prompt(self._prompts, count, begin=begin), max_new_tokens=1)
            if output := self._decoded(engine, task):
                self._measured.readings.append(Reading(engine.name, count, output.rounds[0].at_s))

    def _decoded(self, engine: Engine, task: Task) -> Output | None:
        """What an engine says, or None where it has failed, now or before."""
        if engine.name in self._measured.failed:
            return None
        time.sleep(SETTLE_S)
        try:
            return self._workers[engine.worker].decode(task)
        except WorkerError as error:
            done = len(self._measured.of(engine.name))
            self._measured.failed[engine.name] = f"after {done} runs: {error}"
            return None

    def _task(self, prompt: int, engine: Engine, max_new_tokens: int) -> Task:
        return Task(
            tokens=self._prompts[prompt].tokens,
            max_new_tokens=max_new_tokens,
            temperature=self._settings.temperature,
            seed=self._settings.seed + prompt,
            law="auto" if self._settings.law_name == "greedy" else self._settings.law_name,
            draft=engine.draft,
            draft_length=engine.draft_length,
        )


def long_prompt(prompts: Sequence[TokenPrompt], count: int, *, begin: int) -> tuple[int, ...]:
    """`count` tokens: those of the prompts one after the other from number `begin` on, as often as it takes."""
    around = itertools.cycle([*prompts[begin % len(prompts) :], *prompts[: begin % len(prompts)]])
    return tuple(itertools.islice((token for prompt in around for token in prompt.tokens), count))
