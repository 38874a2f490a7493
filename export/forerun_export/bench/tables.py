"""The tables of a report, as text and as HTML."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun_export.bench.engines import PLAIN, Engine
from forerun_export.bench.grid import Grid, interval, number, pair, spread_cell
from forerun_export.bench.report import BenchReport
from forerun_export.bench.round_tables import predictions, prefill, sweep, time_splits
from forerun_export.bench.statistics import Spread
from forerun_export.bench.summaries import REFERENCES, Summary

SHOWN_PLACES = 5  # of a round, from the first on; the JSON has all
RESTS = 0.5  # from this share of rounds without a proposal on it is said
WIDTH = 168  # where there is no terminal that has one


def grids(report: BenchReport) -> list[Grid]:
    """All tables of a report."""
    found = [_category(report, category) for category in report.categories]
    found += prompt_grids(report)
    if report.prefill_s:
        found.append(prefill(report))
    if report.time_splits:
        found.append(time_splits(report))
    if report.predictions:
        found.append(predictions(report))
    if report.sweep:
        found.append(sweep(report))
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
    yield from _settings_tried(report)
    yield from report.notes
    yield from _resting(report)
    ours = [engine.name for engine in report.shown if engine.is_forerun and not engine.is_plain]
    for how in dict.fromkeys(one.lossless.how for (_, name), one in report.summaries.items() if name in ours):
        yield f"lossless: {how}"
    if not report.lossless:
        yield "SPECULATION CHANGED A TOKEN: `forerun certify` tells a tie from a bug"


def _settings_tried(report: BenchReport) -> Iterator[str]:
    """What an engine that looked for its best setting found of each."""
    for engine in report.shown:
        profile = report.measured.profiles.get(engine.worker) or {}
        if engine.is_plain and (tried := profile.get("tried_tokens_per_s")):
            said = "; ".join(f"{name}: {speed:.1f}" for name, speed in tried.items())
            yield f"{engine.label}: settings tried before the runs, tokens/s: {said}"


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
    references = [name for name in REFERENCES if report.measured.of(name)]
    rows = [_row(report, engine, one, references) for engine, one in found if one is not None]
    prompts = max((one.prompts for _, one in found if one is not None), default=0)
    return Grid(
        f"{category}: {prompts} prompts",
        (
            "engine",
            "tokens/s",
            *(f"x {REFERENCES[name]}" for name in references),
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


def prompt_grids(report: BenchReport) -> list[Grid]:
    """Each prompt by itself: what half of a category's prompts reach, what nine in ten do, and the worst one."""
    reading = (
        "median / lowest decile / lowest of the prompts, each by itself; the lowest decile of ten prompts or fewer is "
        "the lowest"
    )
    ups = _by_prompt(report, lambda one: one.prompt_speed_ups.get(PLAIN), 2, without=PLAIN)
    rates = _by_prompt(report, lambda one: one.prompt_tokens_per_s, 1)
    found = [("times forerun plain, by prompt", ups), ("tokens/s, by prompt", rates)]
    return [Grid(title, columns, rows, reading) for title, (columns, rows) in found if len(columns) > 2]


def _by_prompt(
    report: BenchReport, of: Callable[[Summary], Spread | None], digits: int, *, without: str = ""
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table by category and engine, engines without any figure left out."""
    found = {key: of(one) for key, one in report.summaries.items()}
    engines = [
        engine
        for engine in report.shown
        if engine.name != without and any(found.get((category, engine.name)) for category in report.categories)
    ]
    rows = []
    for category in report.categories:
        prompts = max(one.prompts for (place, _), one in report.summaries.items() if place == category)
        cells = [spread_cell(found.get((category, engine.name)), digits) for engine in engines]
        rows.append([category, str(prompts), *cells])
    return ["category", "prompts", *(report.label(engine) for engine in engines)], rows


def _row(report: BenchReport, engine: Engine, one: Summary, references: Sequence[str]) -> list[str]:
    peak = report.measured.peak_bytes.get(engine.worker)
    together = "*" if report.shares_process(engine) else ""
    return [
        report.label(engine),
        interval(one.tokens_per_s, 1),
        *(interval(one.speed_ups.get(name), 2) for name in references),
        pair(one.first_token_s),
        pair(one.token_s),
        number(one.tokens_per_target_call, 2),
        " ".join(f"{share:.2f}".removeprefix("0") for share in (one.acceptance or ())[:SHOWN_PLACES]),
        f"{peak / 1e6:.0f}{together}" if peak else "",
        str(one.lossless),
    ]


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
