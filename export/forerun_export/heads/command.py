"""`forerun train-head`: from its options to what it prints and writes."""

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from forerun_export.heads.folder import HeadFigures
from forerun_export.heads.pipeline import Options, Result, told, train_head
from forerun_export.heads.training import Progress, Schedule
from forerun_export.progress import console_progress

_UNTOLD = ("target", "command", "work", "device")
"""Not a part of the card's command, or told in another way."""


def run(target: str, *, work: Path | None, as_json: bool, **given: Any) -> None:
    """Train, and print what came of it. See `forerun train-head --help`."""
    out: Path = given["out"].absolute()
    options = Options(
        target=target,
        work=work if work is not None else out.with_name(f"{out.name}.work"),
        command=command_line(target, given),
        **given,
    )
    with console_progress() as progress:
        result = train_head(options, report=progress, watch=show)
    if as_json:
        click.echo(json.dumps(to_json(result)))
    else:
        click.echo(f"{result.path}: trained, best after step {result.trained.best.step:,}\n{table(result.drafts)}")
        for one in result.data.overlaps:
            click.echo(f"held out: {one}")


def command_line(target: str, given: Mapping[str, Any]) -> str:
    """The command with every option that is not as it would be anyway, paths by their last part."""
    usual = asdict(Options(target="", out=Path(), work=Path()))
    words = ["forerun", "train-head", told(target)]
    for name, value in given.items():
        if name in _UNTOLD or value == usual[name]:
            continue
        values = value if isinstance(value, tuple | list) else [value]
        is_path = name in ("prompts", "text", "held_out", "start", "out")
        words += [
            word for one in values for word in (f"--{name.replace('_', '-')}", Path(one).name if is_path else str(one))
        ]
    return shlex.join(words)


def show(progress: Progress, schedule: Schedule) -> None:
    """A line for each measurement: where training is, its loss, and what held-out answers say by drafted token."""
    kinds = "; ".join(
        f"{kind} greedy {rates(figures.greedy)}, T = 1 {rates(figures.overlap)}"
        for kind, figures in progress.figures.items()
    )
    click.echo(f"step {progress.step}/{schedule.steps}, loss {progress.loss:.3f}; {kinds}", err=True)


def rates(values: tuple[float, ...]) -> str:
    """Two digits of each; a dash for what was never tried."""
    return " ".join("-" if math.isnan(value) else f"{value:.2f}" for value in values) or "-"


def table(drafts: Mapping[str, Mapping[str, HeadFigures]]) -> str:
    """Lines of draft, kind of prompt and figures."""
    return "\n".join(
        f"{draft:10} {kind:14} greedy {rates(figures.greedy):26} T = 1 {rates(figures.overlap):26} "
        f"tokens a call {rates(figures.tokens_a_call)}"
        for draft, by_kind in drafts.items()
        for kind, figures in by_kind.items()
    )


def to_json(result: Result) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "path": str(result.path),
        "steps": result.trained.steps,
        "best_step": result.trained.best.step,
        "data": asdict(result.data),
        "drafts": {
            name: {kind: _known(figures) for kind, figures in by_kind.items()}
            for name, by_kind in result.drafts.items()
        },
    }


def _known(figures: HeadFigures) -> dict[str, list[float | None]]:
    """As JSON can say it: no number is null."""
    return {
        name: [None if math.isnan(value) else value for value in values] for name, values in asdict(figures).items()
    }
