"""Pictures of a report: bars with intervals, acceptance by position, where a round's time goes, speed-up against K."""

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from forerun_export.bench.engines import Engine
from forerun_export.bench.grid import as_html
from forerun_export.bench.report import ALL, BenchReport
from forerun_export.bench.tables import grids, headline, remarks

# Okabe and Ito's colours, which readers of every kind of sight tell apart.
COLOURS = {
    "torch": "#999999",
    "torch-assisted": "#CC79A7",
    "optimum": "#D55E00",
    "onnxruntime-genai": "#F0E442",
    "onnxruntime-genai-ngram": "#000000",
    "forerun-plain": "#56B4E9",
    "forerun-model": "#0072B2",
    "forerun-ngram": "#009E73",
    "forerun-auto": "#E69F00",
}
PARTS = {"draft": "#E69F00", "verify": "#0072B2", "sampling": "#009E73", "host": "#999999"}
STYLES = ("-", "--", ":", "-.")


def save_plot(report: BenchReport, path: Path) -> None:
    """Write the picture to a .png or .svg file, or with all tables to a self-contained .html page."""
    if path.suffix == ".html":
        path.write_text(page(report), encoding="utf-8")
    else:
        path.write_bytes(_image(report, path.suffix[1:]))


def page(report: BenchReport) -> str:
    """A page that needs no other file."""
    picture = _image(report, "svg").decode()
    picture = picture[picture.index("<svg") :]  # an XML declaration has no place inside a page
    said = "".join(f"<p>{html.escape(line)}</p>\n" for line in headline(report))
    tables = "\n".join(as_html(grid) for grid in grids(report))
    noted = "".join(f"<li>{html.escape(line)}</li>\n" for line in remarks(report))
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>forerun bench</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; color: #222 }}
svg {{ width: 100%; height: auto }}
table {{ border-collapse: collapse; margin: 2em 0; font-variant-numeric: tabular-nums }}
caption {{ text-align: left; padding-bottom: .5em }}
th, td {{ border-bottom: 1px solid #ddd; padding: .25em .7em; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
</style>
<h1>forerun bench</h1>
{said}{picture}
{tables}
<ul>{noted}</ul>
</html>
"""


def _image(report: BenchReport, kind: str) -> bytes:
    buffer = io.BytesIO()
    draw(report).savefig(
        buffer, format=kind, dpi=150, bbox_inches="tight", metadata={"Date": None} if kind == "svg" else {}
    )
    return buffer.getvalue()


def draw(report: BenchReport) -> Figure:
    """The figure: bars above, the other panels that have something to show below."""
    panels: list[Callable[[Axes, BenchReport], None]] = []
    if _acceptances(report):
        panels.append(_acceptance)
    if report.sweep:
        panels.append(_speed_up_by_length)
    if report.predictions:
        panels.append(_where_time_goes)
    width = max(12.0, 1.5 + 2.4 * len(report.categories))
    figure = Figure(figsize=(width, 9.5 if panels else 5.0), layout="constrained")
    grid = figure.add_gridspec(2 if panels else 1, max(1, len(panels)))
    _bars(figure.add_subplot(grid[0, :]), report)
    for number, panel in enumerate(panels):
        panel(figure.add_subplot(grid[1, number]), report)
    figure.suptitle("\n".join(headline(report)), fontsize=9)
    return figure


def _bars(axes: Axes, report: BenchReport) -> None:
    engines = [engine for engine in report.shown if report.measured.of(engine.name)]
    width = 0.85 / max(1, len(engines))
    for number, engine in enumerate(engines):
        for place, category in enumerate(report.categories):
            one = report.summaries.get((category, engine.name))
            if one is None or one.tokens_per_s is None:
                continue
            rate = one.tokens_per_s
            at = place + (number - (len(engines) - 1) / 2) * width
            label = engine.label if place == 0 else None
            axes.bar(at, rate.value, width * 0.92, color=_colour(engine), label=label)
            if rate.low is not None and rate.high is not None:
                axes.vlines(at, rate.low, rate.high, color="black", linewidth=1)
            if one.prompt_tokens_per_s is not None and one.prompts > 1:
                axes.plot(at, one.prompt_tokens_per_s.lowest_decile, marker="_", color="white", markersize=5)
            axes.annotate(f"{rate.value:.3g}", (at, rate.high or rate.value), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(report.categories)), report.categories)
    axes.set_ylabel("tokens/s while decoding (white: the prompts' lowest decile)")
    axes.margins(y=0.3)
    axes.legend(fontsize=8, ncols=2)
    _plain(axes)


def _acceptance(axes: Axes, report: BenchReport) -> None:
    for label, (colour, acceptance) in _acceptances(report).items():
        axes.plot(range(1, len(acceptance) + 1), acceptance, marker="o", color=colour, label=label)
    axes.set_title("share of proposals kept, by place in the round", fontsize=10)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8)
    _plain(axes)


def _acceptances(report: BenchReport) -> dict[str, tuple[str, Sequence[float]]]:
    """Colour and shares by label: of each draft's longest fixed K if there is one, else of every bar.

    Where K adapts, later places are proposed only where they are likely to be kept, so shares may rise.
    """
    category = report.categories[-1]
    points = {point.draft: point for point in report.sweep if point.category == category}  # the last K is the longest
    if points:
        return {
            f"{draft}, K = {point.draft_length}": (COLOURS[f"forerun-{draft}"], point.acceptance or ())
            for draft, point in points.items()
        }
    found = {engine: report.summaries.get((category, engine.name)) for engine in report.shown}
    return {engine.label: (_colour(engine), one.acceptance) for engine, one in found.items() if one and one.acceptance}


def _speed_up_by_length(axes: Axes, report: BenchReport) -> None:
    """Observed lines with intervals, the formula's beside them; of all categories together, or each where few."""
    few = [category for category in report.categories if category != ALL]
    shown = few if len(few) <= len(STYLES) else [ALL]
    for draft in dict.fromkeys(point.draft for point in report.sweep):
        colour = COLOURS[f"forerun-{draft}"]
        for style, category in zip(STYLES, shown, strict=False):
            points = [point for point in report.sweep if (point.draft, point.category) == (draft, category)]
            seen = [(point.draft_length, point.found.observed) for point in points if point.found.observed]
            lengths, values = [0, *(k for k, _ in seen)], [1.0, *(one.value for _, one in seen)]
            axes.plot(lengths, values, style, marker="o", color=colour, label=f"{draft}, {category}")
            for length, one in seen:
                if one.low is not None and one.high is not None:
                    axes.vlines(length, one.low, one.high, color=colour, linewidth=1)
            predicted = [1.0, *(point.found.predicted for point in points)]
            axes.plot([0, *(point.draft_length for point in points)], predicted, style, color=colour, alpha=0.35)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title("speed-up over plain at a fixed K (pale: predicted)", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=7)
    _plain(axes)


def _where_time_goes(axes: Axes, report: BenchReport) -> None:
    """Milliseconds of an emitted token by what they were spent on."""
    category = report.categories[-1]
    rows = [(engine, one) for engine in report.shown if (one := report.predictions.get((category, engine.name)))]
    plain = rows[0][1]
    spent = [("forerun plain", 1.0, (0.0, plain.plain_target, plain.plain_sampling, plain.plain_host))]
    spent += [(engine.label, one.tokens, (one.draft, one.verify, one.sampling, one.host)) for engine, one in rows]
    for number, (_, tokens, seconds) in enumerate(spent):
        left = 0.0
        for (part, colour), taken in zip(PARTS.items(), seconds, strict=True):
            milliseconds = taken / tokens * 1e3
            axes.barh(number, milliseconds, left=left, color=colour, label=part if number == 0 else None)
            left += milliseconds
    axes.set_yticks(range(len(spent)), [label.removeprefix("forerun, ") for label, _, _ in spent], fontsize=8)
    axes.invert_yaxis()
    axes.set_title("ms of an emitted token", fontsize=10)
    axes.margins(x=0.3)
    axes.legend(fontsize=8, loc="lower right")
    _plain(axes)


def _colour(engine: Engine) -> str:
    return COLOURS.get(engine.name, "#000000")


def _plain(axes: Any, sides: Sequence[str] = ("top", "right")) -> None:
    for side in sides:
        axes.spines[side].set_visible(False)
