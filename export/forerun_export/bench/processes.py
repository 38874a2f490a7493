"""The parent's side of worker processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from forerun.errors import ForerunError
from forerun_export.bench.runs import Output, Task


class WorkerError(ForerunError):
    """A worker that could not load its system, could not decode a task, or is gone."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker loads; `bytes` is what it is expected to need of memory."""

    name: str
    kind: str
    arguments: Mapping[str, Any]
    bytes: int = 0


@dataclass(frozen=True)
class Loaded:
    """What loading took."""

    load_s: float
    load_peak_bytes: int | None


class Worker:
    """A process with one system. Use as a context manager: leaving it ends the process."""

    def __init__(self, spec: WorkerSpec, *, threads: int) -> None:
        self.spec = spec
        self.peak_bytes: int | None = None
        self.profile: Mapping[str, Any] | None = None
        self._messages = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - see close
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forerun_export.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        )

    def load(self) -> Loaded:
        """Load the system. Raises WorkerError."""
        return Loaded(**self._ask({"kind": self.spec.kind, "arguments": self.spec.arguments}))

    def decode(self, task: Task) -> Output:
        """Decode one prompt. Raises WorkerError."""
        answer = self._ask(task.to_json())
        self.peak_bytes, self.profile = answer["peak_bytes"], answer["profile"]
        return Output.from_json(answer["output"])

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(self._how_it_ended())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _how_it_ended(self) -> str:
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "its process was killed (signal 9), most often for want of memory; free some or leave it out"
        self._messages.seek(0)
        said = (self._messages.read().strip().splitlines() or ["it said nothing"])[-1][:300]
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return f"its process ended {how} ({said}); leave it out, or mend that"

    def close(self) -> None:
        """End the process."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                _close(pipe)
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # in the middle of a task that no one waits for
            self.process.kill()
            self.process.wait()
        self._messages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.process.kill()
        self.close()


def _close(pipe: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # what it still held can reach no one
        pipe.close()


def waves(specs: Sequence[WorkerSpec], available: int | None) -> list[list[WorkerSpec]]:
    """Groups of workers that fit into memory together, in order; one that is larger than all of it is alone."""
    groups: list[list[WorkerSpec]] = []
    for spec in specs:
        fits = [
            group for group in groups if available is None or sum(one.bytes for one in group) + spec.bytes <= available
        ]
        if fits:
            fits[0].append(spec)
        else:
            groups.append([spec])
    return groups
