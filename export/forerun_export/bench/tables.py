"""The tables of a report, as text and as HTML."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun_export.bench.engines import Engine
from forerun_export.bench.report import BenchReport
from forerun_export.bench.statistics import Estimate
from forerun_export.bench.summaries import REFERENCES, Summary

SHOWN_PLACES = 5  # of a round, from the first on; the JSON has all
RESTS = 0.5  # from this share of rounds without a proposal on it is said
WIDTH = 168  # where there is no terminal that has one


@dataclass(frozen=True)
class Grid:
    """A table with a title; `reading` says what its columns mean."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    reading: str = ""


def grids(report: BenchReport) -> list[Grid]:
    """All tables of a report."""
    found = [_category(report, category) for category in report.categories]
    if report.predictions:
        found.append(_predictions(report))
    if report.sweep:
        found.append(_sweep(report))
    return found


def headline(report: BenchReport) -> list[str]:
    """What was measured and on what; a line each."""
    settings, machine = report.settings, report.machine
    law = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}, law {settings.law_name}"
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    flags = f" ({', '.join(machine['flags'])})" if machine["flags"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return [
        f"{report.directory}: {report.prompts} prompts, {settings.max_new_tokens} new tokens, {law}, "
        f"{settings.threads} threads, {settings.repeats} time(s), one prompt at a time",
        f"{machine['cpu']}{flags}, {machine['cores']} cores{memory}, {machine['system']}; {packages}",
    ]


def remarks(report: BenchReport) -> Iterator[str]:
    """What is missing, what could not be checked, and what a reader must know."""
    for engine, reason in report.failed.items():
        yield f"{engine.label}: {'incomplete' if report.measured.of(engine.name) else 'not available'}: {reason}"
    yield from report.notes
    yield from _resting(report)
    ours = [engine.name for engine in report.shown if engine.is_forerun and not engine.is_plain]
    for how in dict.fromkeys(one.lossless.how for (_, name), one in report.summaries.items() if name in ours):
        yield f"lossless: {how}"
    if not report.lossless:
        yield "SPECULATION CHANGED A TOKEN: `forerun certify` tells a tie from a bug"


def _resting(report: BenchReport) -> Iterator[str]:
    """Where an adaptive K mostly chose not to speculate."""
    for engine in report.shown:
        shares = {
            category: (one.rounds_by_draft or {}).get("none", 0.0)
            for (category, name), one in report.summaries.items()
            if name == engine.name
        }
        where = ", ".join(f"{category} ({share:.0%} of rounds)" for category, share in shares.items() if share > RESTS)
        if where and not engine.is_plain and engine.is_forerun and engine.draft_length is None:
            yield f"{engine.label} mostly proposed nothing in {where}: there was no match, or it would not have paid"


def _category(report: BenchReport, category: str) -> Grid:
    found = [(engine, report.summaries.get((category, engine.name))) for engine in report.shown]
    rows = [_row(report, engine, one) for engine, one in found if one is not None]
    prompts = max((one.prompts for _, one in found if one is not None), default=0)
    return Grid(
        f"{category}: {prompts} prompts",
        (
            "engine",
            "tokens/s",
            "x forerun plain",
            "x PyTorch",
            "first token, ms",
            "a token, ms",
            "tokens a call",
            "kept by place",
            "peak MB",
            "lossless",
        ),
        rows,
        "brackets: 95% intervals over prompts; tokens/s is of decoding, behind the first tokens; times are medians and "
        "95th percentiles",
    )


def _row(report: BenchReport, engine: Engine, one: Summary) -> list[str]:
    peak = report.measured.peak_bytes.get(engine.worker)
    together = "*" if report.shares_process(engine) else ""
    return [
        engine.label,
        interval(one.tokens_per_s, 1),
        *(interval(one.speed_ups.get(name), 2) for name in REFERENCES),
        _pair(one.first_token_s),
        _pair(one.token_s),
        _number(one.tokens_per_target_call, 2),
        " ".join(f"{share:.2f}".removeprefix("0") for share in (one.acceptance or ())[:SHOWN_PLACES]),
        f"{peak / 1e6:.0f}{together}" if peak else "",
        str(one.lossless),
    ]


def _predictions(report: BenchReport) -> Grid:
    labels = {engine.name: engine.label for engine in report.engines}
    rows = []
    for (category, name), one in report.predictions.items():
        plain = one.plain_target + one.plain_sampling + one.plain_host
        parts = (one.draft, one.verify, one.sampling, one.host, plain)
        rows.append(
            [
                category,
                labels[name],
                _number(one.mean_draft_length, 1),
                _shares(report.summaries[category, name].rounds_by_draft),
                _number(one.acceptance, 2),
                f"{one.expected_tokens:.2f} / {one.tokens:.2f}",
                f"{one.predicted:.2f}",
                f"{one.with_observed_tokens:.2f}",
                interval(one.observed, 2),
                *(f"{part * 1e3:.2f}" for part in parts),
            ]
        )
    return Grid(
        "speed-up: predicted by Leviathan's formula from the measured T(M), and observed",
        (
            "category",
            "engine",
            "K",
            "rounds by draft",
            "a",
            "tokens a round, formula / seen",
            "predicted",
            "with tokens seen",
            "observed",
            "draft ms",
            "verify ms",
            "sampling ms",
            "host ms",
            "plain token ms",
        ),
        rows,
        "ms of a round; the formula knows draft and verify only, and proposals kept independently with probability a",
    )


def _sweep(report: BenchReport) -> Grid:
    rows = [
        [
            point.category,
            point.draft,
            str(point.draft_length),
            f"{point.found.tokens:.2f}",
            f"{point.found.predicted:.2f}",
            interval(point.found.observed, 2),
        ]
        for point in report.sweep
    ]
    columns = ("category", "draft", "K", "tokens a round", "predicted", "observed")
    return Grid("speed-up at a fixed K", columns, rows)


def interval(estimate: Estimate | None, digits: int) -> str:
    """The figure, and its interval in brackets."""
    if estimate is None:
        return ""
    value = f"{estimate.value:.{digits}f}"
    if estimate.low is None:
        return value
    return f"{value} [{estimate.low:.{digits}f}-{estimate.high:.{digits}f}]"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _shares(shares: Mapping[str, float] | None) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in (shares or {}).items())


def _pair(seconds: tuple[float | None, float | None]) -> str:
    median, high = seconds
    return "" if median is None or high is None else f"{median * 1e3:.0f} / {high * 1e3:.0f}"


def as_text(report: BenchReport) -> str:
    """For a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    with console.capture() as captured:
        for line in headline(report):
            console.print(escape(line))
        for grid in grids(report):
            table = Table(title=escape(grid.title), caption=escape(grid.reading) or None, title_justify="left")
            for number, column in enumerate(grid.columns):
                table.add_column(escape(column), overflow="fold", justify="left" if number < 2 else "right")
            for row in grid.rows:
                table.add_row(*map(escape, row))
            console.print(table)
        for line in remarks(report):
            console.print(escape(line))
    return captured.get().rstrip()


def as_html(grid: Grid) -> str:
    """One table element."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in grid.columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in grid.rows)
    caption = f"<caption><b>{html.escape(grid.title)}</b> {html.escape(grid.reading)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
