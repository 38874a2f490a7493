"""What a worker process runs: forerun, or another library. Each decodes one task and stamps its rounds."""

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import forerun
from forerun.costs import Costs
from forerun_export.bench.runs import PHASES, Output, Round, Task


class System(Protocol):
    """A loaded model."""

    def decode(self, task: Task) -> Output:
        """Decode one prompt. Raises ForerunError for what this system cannot do."""

    def profile(self) -> Mapping[str, Any] | None:
        """What the system believes its calls to cost, for the report; None where it goes by no such numbers."""


def open_system(kind: str, arguments: Mapping[str, Any]) -> System:
    """The system of this kind; other libraries are imported only where they are asked for."""
    if kind == "forerun":
        return ForerunSystem(**arguments)
    if kind == "torch":
        from forerun_export.bench.torch_system import TorchSystem

        return TorchSystem(**arguments)
    if kind == "genai":
        from forerun_export.bench.genai_system import GenaiSystem

        return GenaiSystem(**arguments)
    from forerun_export.bench.optimum_system import OptimumSystem

    return OptimumSystem(**arguments)


def is_installed(module: str) -> bool:
    """Whether a module of another library can be imported; it is not."""
    return importlib.util.find_spec(module) is not None


def how_to_install(module: str) -> str:
    """What to do where a module of another library is missing."""
    return f"install it with: pip install 'forerun[{'genai' if module == 'onnxruntime_genai' else 'bench'}]'"


class ForerunSystem:
    """An engine directory."""

    def __init__(self, directory: str, *, threads: int, load_draft: bool) -> None:
        self._decoder = forerun.open(directory, threads=threads, load_draft=load_draft)
        self._phases = {graph: self._phase(graph) for graph in self._decoder.backend.seconds_by_graph}

    def _phase(self, graph: Path) -> str:
        folder = graph.relative_to(self._decoder.directory.path).parts[0]
        return folder if folder in PHASES else "sampling"

    def decode(self, task: Task) -> Output:
        """See `System.decode`."""
        chunks = self._decoder.stream(
            list(task.tokens),
            max_new_tokens=task.max_new_tokens,
            temperature=task.temperature,
            seed=task.seed if task.law == "coupled" else None,  # under other laws a seed would keep K from adapting
            law=task.law,
            draft=task.draft,
            draft_length=task.draft_length,
        )
        tokens: list[int] = []
        rounds: list[Round] = []
        before, started = self._seconds(), time.perf_counter()
        for chunk in chunks:
            at_s, now = time.perf_counter() - started, self._seconds()
            tokens += chunk.token_ids
            proposed = chunk.accepted + len(chunk.rejected)
            taken = {phase: now[phase] - before[phase] for phase in PHASES}
            rounds.append(Round(at_s, len(chunk.token_ids), proposed, chunk.accepted, chunk.draft, taken))
            before = now
        return Output(tuple(tokens), tuple(rounds))

    def _seconds(self) -> dict[str, float]:
        """Seconds inside the engines of each phase so far."""
        sums = dict.fromkeys(PHASES, 0.0)
        for graph, seconds in self._decoder.backend.seconds_by_graph.items():
            sums[self._phases[graph]] += seconds
        return sums

    def profile(self) -> Mapping[str, Any] | None:
        """The costs that the adaptive K goes by, where it was asked for: seconds of a call with 1, 2, .. tokens."""
        costs: Costs | None = vars(self._decoder).get("costs")  # it is measured when it is first looked at
        if costs is None:
            return None
        counts = range(1, self._decoder.manifest.limits.draft_length + 2)
        return {
            "target_s": [costs.target_s(count) for count in counts],
            "draft_s": [costs.draft_s(count) for count in counts],
        }
