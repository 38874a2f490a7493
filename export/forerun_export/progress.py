"""Progress of the long steps: one function that they call, and bars on the terminal that show it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn


class Report(Protocol):
    """Told how far a step has come: (what it does, units done, units in all)."""

    def __call__(self, step: str, done: int = 0, total: int = 1) -> None:
        """Report."""


def silent(step: str, done: int = 0, total: int = 1) -> None:
    """A report that shows nothing."""


def part(report: Report, step: str) -> Callable[[int, int], None]:
    """The report of one step, for code that only counts."""
    return lambda done, total: report(step, done, total)


@contextmanager
def console_progress() -> Iterator[Report]:
    """A report that draws a bar for each step on stderr, or a line for each where that is no terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (TextColumn("{task.description:34}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        yield _Bars(bars)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = ""

    def __call__(self, step: str, done: int = 0, total: int = 1) -> None:
        if step != self._step:
            self._step = step
            self._console.print(step, soft_wrap=True)


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, step: str, done: int = 0, total: int = 1) -> None:
        if step not in self._tasks:
            for earlier in self._tasks.values():  # steps follow one another: a new one means the others are done
                self._finish(earlier)
            self._tasks[step] = self._bars.add_task(step, total=total)
        self._bars.update(self._tasks[step], completed=done, total=total)

    def _finish(self, task: TaskID) -> None:
        self._bars.update(task, completed=1, total=1)
        self._bars.stop_task(task)
