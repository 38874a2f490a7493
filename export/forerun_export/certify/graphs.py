"""Part 2: the sampling graphs against the oracle, on an engine directory's own files and on freshly built ones."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forerun_export.certify.graph_cases import Shape
from forerun_export.certify.graph_checks import DECISIONS, Check, Compared, smallest_rate
from forerun_export.certify.graph_laws import NUMBERS
from forerun_export.certify.graph_sets import FreshGraphs, GraphSet
from forerun_export.certify.report import Finding, verdict
from forerun_export.certify.statistics import POWER
from forerun_export.progress import Report, silent

PART = "graphs"
CHECKS: Mapping[str, Check] = {**DECISIONS, **NUMBERS}
SMALL = (2, 5, 64)
ROWS_OF_SMALL, ROWS_OF_REAL = 80, 4
DRAFT_LENGTHS = (1, 2, 3, 4)
LISTED = 20


class Tally(NamedTuple):
    """All cases of one graph: how many, and those that differ, with their vocabulary."""

    cases: int
    differences: Sequence[tuple[int, Compared]]

    @property
    def unexplained(self) -> int:
        """How many differ by more than rounding."""
        return sum(1 for _, found in self.differences if found.margin and not found.margin.explained)


def graphs(built: GraphSet, *, rounds: int = 2, report: Report = silent) -> Iterator[Finding]:
    """One finding for each graph: the directory's own with its vocabulary, fresh ones with 2..64 tokens."""
    fresh = [FreshGraphs(size) for size in SMALL]
    for done, (name, check) in enumerate(CHECKS.items()):
        report("Comparing graphs with the oracle", done, len(CHECKS))
        small = tally(check, fresh, rows=ROWS_OF_SMALL, rounds=rounds)
        yield finding(name, small, tally(check, [built], rows=ROWS_OF_REAL, rounds=rounds), built.vocabulary_size)


def tally(check: Check, sets: Sequence[GraphSet], *, rows: int, rounds: int, seed: int = 0) -> Tally:
    """Random cases of every draft length on every set of graphs."""
    cases, differences = 0, []
    rng = np.random.default_rng(seed)
    for one in sets:
        for draft_length in DRAFT_LENGTHS * rounds:
            for compared in check(one, rng, Shape(rows, draft_length, one.vocabulary_size)):
                cases += 1
                if compared.margin is not None:
                    differences.append((one.vocabulary_size, compared))
    return Tally(cases, differences)


def finding(name: str, small: Tally, real: Tally, vocabulary_size: int) -> Finding:
    """What the comparison of one graph shows."""
    differences = [*small.differences, *real.differences]
    bugs = small.unexplained + real.unexplained
    cases = small.cases + real.cases
    return Finding(
        part=PART,
        shown=f"{name}: equals the oracle on {small.cases} cases of 2..64 tokens, {real.cases} of {vocabulary_size}",
        figure=_figure(differences, bugs),
        power=f"a fault in {smallest_rate(cases, POWER):.2%} of such cases (99%)",
        status=verdict(not bugs),
        numbers={
            "graph": name,
            "cases": cases,
            "differences": len(differences),
            "bugs": bugs,
            "listed": [_listed(size, compared) for size, compared in _by_weight(differences)[:LISTED]],
        },
    )


def _by_weight(differences: Sequence[tuple[int, Compared]]) -> list[tuple[int, Compared]]:
    return sorted(differences, key=lambda item: item[1].margin is not None and item[1].margin.explained)


def _figure(differences: Sequence[tuple[int, Compared]], bugs: int) -> str:
    if bugs:
        size, first = _by_weight(differences)[0]
        return f"BUG: {bugs} differ, e.g. V={size}: oracle {first.oracle}, graph {first.graph}"
    if not differences:
        return "no difference"
    margins = [compared.margin for _, compared in differences if compared.margin is not None]
    largest = max(margins, key=lambda m: m.margin)
    return f"{len(differences)} differ within float32 (margin {largest.margin:.0e}, bound {largest.bound:.0e})"


def _listed(size: int, compared: Compared) -> dict[str, Any]:
    margin = compared.margin
    finite = margin is not None and margin.margin < float("inf")
    return {
        "vocabulary_size": size,
        "oracle": compared.oracle,
        "graph": compared.graph,
        "margin": margin.margin if margin is not None and finite else None,
        "bound": margin.bound if margin is not None else None,
        "explained": margin is None or margin.explained,
    }
