"""What a certificate says: one finding for each thing that was shown, and the table that people read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun.inspection import cost_of
from forerun.manifest import ModelRecord

Status = Literal["pass", "fail", "below power", "not shown"]
STYLES: Mapping[Status, str] = {"pass": "green", "fail": "bold red", "below power": "yellow", "not shown": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim and what came of it.

    `part` is one of PARTS, `shown` the claim, `figure` what was measured, `power` what would have been caught.
    `below power`: a mutant that no check of this size can tell from the right rule. `not shown`: the directory lacks
    what the claim is about. `numbers` are the same things for programs.
    """

    part: str
    shown: str
    figure: str
    power: str
    status: Status
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As an object of the certificate's JSON."""
        return {
            "part": self.part,
            "shown": self.shown,
            "figure": self.figure,
            "power": self.power,
            "status": self.status,
            **self.numbers,
        }


def verdict(passed: bool) -> Status:
    """`pass` or `fail`."""
    return "pass" if passed else "fail"


@dataclass(frozen=True)
class Certificate:
    """All findings about one engine directory; `law` says whose law they are about."""

    directory: str
    findings: Sequence[Finding]
    seconds: float
    law: str

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        """What failed."""
        return [finding for finding in self.findings if finding.status == "fail"]

    def to_json(self) -> dict[str, Any]:
        """The object that `forerun certify --json` prints."""
        return {
            "directory": self.directory,
            "passed": self.passed,
            "law": self.law,
            "seconds": round(self.seconds, 1),
            "findings": [finding.to_json() for finding in self.findings],
        }

    def render(self) -> str:
        """For people: a table as wide as the terminal, then the verdict."""
        console = Console(highlight=False)
        with console.capture() as captured:
            console.print(self._table())
        count = len(self.findings)
        said = f"{count} of {count} hold" if self.passed else f"{len(self.failures)} of {count} FAILED"
        below = sum(finding.status != "pass" for finding in self.findings) - len(self.failures)
        more = f", {below} of them not shown or below the power stated" if below else ""
        return f"{captured.get()}{self.law}\n{self.directory}: {said}{more} ({self.seconds:.0f} s)"

    def _table(self) -> Table:
        table = Table(show_lines=True)
        for column in ("part", "shown", "measured", "would have caught", ""):
            table.add_column(column, overflow="fold")
        for finding in self.findings:
            style = STYLES[finding.status]
            cells = (finding.part, finding.shown, finding.figure, finding.power)
            table.add_row(*map(escape, cells), f"[{style}]{finding.status}[/{style}]")
        return table


def whose_law(target: ModelRecord) -> str:
    """A sentence on what the target's law is: that of its built engine, cheaper weights included."""
    if target.precision == "fp32":
        return "The target's law is that of its float32 engine."
    cost = f"; {cost_of(target.precision, target.quantization)}" if target.quantization is not None else ""
    return f"The target's law is that of its {target.precision} engine, not of the checkpoint{cost}."
