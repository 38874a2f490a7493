"""Worker processes of a benchmark: taking turns, sharing memory, dying, and leaving nothing behind."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun.directory import EngineDirectory
from forerun_export.bench import BenchReport, Choice, Settings, bench
from forerun_export.bench.engines import PLAIN, line_up
from forerun_export.bench.measuring import Measured, TokenPrompt, measure
from forerun_export.bench.processes import Worker, WorkerSpec, waves
from forerun_export.bench.prompts import BenchPrompt
from forerun_export.bench.runs import Output, Task
from helpers.table_models import TablePair, table_pair

PROMPTS = [BenchPrompt("chat", "w1 w2"), BenchPrompt("chat", "w3"), BenchPrompt("code", "w4 w5 w6")]
NEW_TOKENS = 12


@pytest.fixture(scope="module", autouse=True)
def enough_memory() -> Iterator[None]:
    """Where it is short, engines share a process or run in groups: what other programs take must not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun_export.bench.available_bytes", lambda: None)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines")


def benched(pair: TablePair, choice: Choice, **settings: Any) -> BenchReport:
    return bench(pair.path, PROMPTS, settings=Settings(max_new_tokens=NEW_TOKENS, **settings), choice=choice)


def killed_at(worker_name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a worker's process before it is asked for the task of this number."""
    decode, asked = Worker.decode, [0]

    def watched(self: Worker, task: Task) -> Output:
        if self.spec.name == worker_name:
            asked[0] += 1
            if asked[0] == number:
                os.kill(self.process.pid, signal.SIGKILL)
                self.process.wait()
        return decode(self, task)

    monkeypatch.setattr(Worker, "decode", watched)


def test_a_worker_that_dies_is_told_and_the_rest_is_kept(pair: TablePair, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at("forerun-model", 4, monkeypatch)  # the first task is the warm-up
    found = benched(pair, Choice(baselines=()))
    reason = next(reason for engine, reason in found.failed.items() if engine.name == "forerun-model")
    assert reason.startswith("after 2 runs: its process was killed (signal 9)")
    assert len(found.measured.of("forerun-model")) == 2
    assert len(found.measured.of(PLAIN)) == len(PROMPTS)
    assert found.summaries["all", "forerun-model"].prompts == 2
    json.dumps(found.to_json(), allow_nan=False)


def test_a_worker_that_ends_by_itself_says_its_last_words() -> None:
    spec = WorkerSpec("broken", "forerun", {"directory": "x", "threads": 1, "load_draft": 3})
    with Worker(spec, threads=1) as worker:
        assert worker.process.stdin is not None
        worker.process.stdin.write("this is no question\n")
        with pytest.raises(Exception, match=r"its process ended with code 1 \(json.*JSONDecodeError"):
            worker.load()


def test_a_directory_that_cannot_be_opened_is_an_error_of_its_engines(tmp_path: Path) -> None:
    spec = WorkerSpec("broken", "forerun", {"directory": str(tmp_path), "threads": 1, "load_draft": True})
    with Worker(spec, threads=1) as worker, pytest.raises(Exception, match=r"manifest\.json"):
        worker.load()


def test_no_process_is_left(pair: TablePair) -> None:
    spec = WorkerSpec(PLAIN, "forerun", {"directory": str(pair.path), "threads": 1, "load_draft": False})
    with Worker(spec, threads=1) as worker:
        worker.load()
        worker.decode(Task(tokens=(1, 2), max_new_tokens=3))
    assert worker.process.returncode == 0


def test_engines_take_turns_and_each_begins_once_in_a_while(pair: TablePair, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    decode = Worker.decode

    def watched(self: Worker, task: Task) -> Output:
        order.append(self.spec.name)
        return decode(self, task)

    monkeypatch.setattr(Worker, "decode", watched)
    benched(pair, Choice(baselines=()))
    measured = order[-4 * len(PROMPTS) :]  # behind the warm-up
    turns = [measured[start : start + 4] for start in range(0, len(measured), 4)]
    assert all(sorted(turn) == sorted(turns[0]) for turn in turns)
    assert len({turn[0] for turn in turns}) > 1


def test_plain_engines_alone_read_long_prompts_another_one_each_time(
    pair: TablePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []
    decode = Worker.decode

    def watched(self: Worker, task: Task) -> Output:
        if task.max_new_tokens == 1:
            asked.append((self.spec.name, tuple(task.tokens)))
        return decode(self, task)

    monkeypatch.setattr(Worker, "decode", watched)
    found = benched(pair, Choice(baselines=()), prefill_tokens=20)
    assert {name for name, _ in asked} == {PLAIN}
    assert {len(tokens) for _, tokens in asked} == {20}
    assert len({tokens for _, tokens in asked}) == len(asked) == len(found.measured.readings) == 3


def sized(*sizes: int) -> list[WorkerSpec]:
    return [WorkerSpec(str(number), "forerun", {}, size) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "available", "expected"),
    [
        ((3, 4, 5), None, [["0", "1", "2"]]),
        ((3, 4, 5), 12, [["0", "1", "2"]]),
        ((3, 4, 5), 8, [["0", "1"], ["2"]]),
        ((3, 9, 2), 8, [["0", "2"], ["1"]]),
    ],
)
def test_workers_that_do_not_fit_together_wait(
    sizes: Sequence[int], available: int | None, expected: list[list[str]]
) -> None:
    assert [[spec.name for spec in group] for group in waves(sized(*sizes), available)] == expected


def test_groups_give_the_same_runs_one_after_the_other(pair: TablePair) -> None:
    line = line_up(EngineDirectory.open(pair.path), Choice(baselines=()), threads=1, available_bytes=None)
    prompts = [TokenPrompt("a", (1, 2)), TokenPrompt("a", (3,))]
    settings = Settings(max_new_tokens=NEW_TOKENS)
    together, apart = (measure(line, prompts, settings, available_bytes=free) for free in (None, 10**9))
    assert together.groups == 1 < apart.groups

    def said(measured: Measured) -> set[tuple[str, int, tuple[int, ...]]]:
        return {(run.engine, run.prompt, run.output.tokens) for run in measured.runs}

    assert said(together) == said(apart)


def test_forerun_shares_a_process_where_memory_is_short(pair: TablePair) -> None:
    directory = EngineDirectory.open(pair.path)
    line = line_up(directory, Choice(baselines=()), threads=1, available_bytes=10**9)
    assert len(line.workers) == 1
    assert line.workers[0].arguments["load_draft"] is True
    assert {engine.worker for engine in line.engines} == {line.workers[0].name}
