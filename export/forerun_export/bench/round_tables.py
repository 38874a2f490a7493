"""Tables of what rounds and prompts cost: reading, where a round's time goes, Leviathan's formula, draft lengths."""

from forerun_export.bench.engines import PLAIN
from forerun_export.bench.grid import Grid, interval, number, shares
from forerun_export.bench.measuring import READINGS
from forerun_export.bench.report import BenchReport
from forerun_export.bench.time_split import PARTS


def prefill(report: BenchReport) -> Grid:
    """How fast each plain engine reads a long prompt."""
    count, ours = report.settings.prefill_tokens, report.prefill_s.get(PLAIN)
    rows = [
        [
            report.label(engine),
            f"{count / seconds:.1f}",
            number(ours and ours / seconds, 2),
            f"{seconds * 1e3:.0f}",
        ]
        for engine in report.shown
        if (seconds := report.prefill_s.get(engine.name))
    ]
    return Grid(
        f"reading a prompt of {count} tokens",
        ("engine", "tokens/s", "x forerun plain", "first token, ms"),
        rows,
        f"the median of {READINGS}; the first token behind the prompt is part of it",
    )


def time_splits(report: BenchReport) -> Grid:
    """A round's milliseconds by part, and what speed-up each part costs."""
    labels = {engine.name: report.label(engine) for engine in report.engines}
    rows = [
        [
            category,
            labels[name],
            number(one.tokens, 2),
            f"{one.round_s * 1e3:.2f}",
            *(f"{one.seconds[part] * 1e3:.2f} ({one.seconds[part] / one.round_s:.0%})" for part in PARTS),
            *(f"{ratio:.2f}" for ratio in (one.speed_up, one.draft_free, one.verification_free)),
        ]
        for (category, name), one in report.time_splits.items()
    ]
    return Grid(
        "where the time of a round goes",
        (
            *("category", "engine", "tokens a round", "a round, ms"),
            *(f"{part}, ms" for part in PARTS),
            *("x plain", "if drafts were free", "if verifying took no longer than one token"),
        ),
        rows,
        "in brackets: share of the round; rounds behind the first ones; what lifts x plain most is what holds it back",
    )


def predictions(report: BenchReport) -> Grid:
    """Leviathan's formula beside what was observed."""
    labels = {engine.name: report.label(engine) for engine in report.engines}
    rows = []
    for (category, name), one in report.predictions.items():
        rows.append(
            [
                category,
                labels[name],
                number(one.mean_draft_length, 1),
                shares(report.summaries[category, name].rounds_by_draft),
                number(one.acceptance, 2),
                f"{one.expected_tokens:.2f} / {one.tokens:.2f}",
                f"{one.predicted:.2f}",
                f"{one.with_observed_tokens:.2f}",
                interval(one.observed, 2),
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
        ),
        rows,
        "the formula knows the time of draft and target only, and proposals kept independently with probability a",
    )


def sweep(report: BenchReport) -> Grid:
    """Speed-ups of each draft at each fixed K."""
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
