"""A table of text, and how figures are written in its cells."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun_export.bench.statistics import Estimate, Spread


@dataclass(frozen=True)
class Grid:
    """A table with a title; `reading` says what its columns mean."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    reading: str = ""


def interval(estimate: Estimate | None, digits: int) -> str:
    """The figure, and its interval in brackets."""
    if estimate is None:
        return ""
    value = f"{estimate.value:.{digits}f}"
    if estimate.low is None:
        return value
    return f"{value} [{estimate.low:.{digits}f}-{estimate.high:.{digits}f}]"


def number(value: float | None, digits: int) -> str:
    """The figure; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def shares(by_name: Mapping[str, float] | None) -> str:
    """Each name with its share."""
    return ", ".join(f"{name} {share:.0%}" for name, share in (by_name or {}).items())


def pair(seconds: tuple[float | None, float | None]) -> str:
    """Milliseconds: a median and what lies above most."""
    median, high = seconds
    return "" if median is None or high is None else f"{median * 1e3:.0f} / {high * 1e3:.0f}"


def spread_cell(one: Spread | None, digits: int) -> str:
    """Median, lowest decile and lowest."""
    if one is None:
        return ""
    return " / ".join(f"{value:.{digits}f}" for value in (one.median, one.lowest_decile, one.lowest))


def as_html(grid: Grid) -> str:
    """One table element."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in grid.columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in grid.rows)
    caption = f"<caption><b>{html.escape(grid.title)}</b> {html.escape(grid.reading)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
