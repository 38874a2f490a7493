"""Part 4: rules that look right and are not. Each is put in the place of the right one and must be caught.

As rules in the enumeration, as graphs beside the right ones, and as host code in the running decoder.
"""

import contextlib
from collections.abc import Iterator, Sequence

from forerun import Decoder
from forerun.edits import PlaceEdits
from forerun.oracle import joint_law, plain_law, total_variation
from forerun.row import Row
from forerun_export.certify.enumeration import TOLERANCE
from forerun_export.certify.equality import splits
from forerun_export.certify.graph_checks import DECISIONS
from forerun_export.certify.graph_sets import FreshGraphs
from forerun_export.certify.graphs import Tally, tally
from forerun_export.certify.report import Finding, Status, verdict
from forerun_export.certify.rule_mutants import RuleMutant, rule_mutants
from forerun_export.certify.statistics import chi_square_tail, critical_value, needed_noncentrality
from forerun_export.certify.wrong_graphs import WRONG_GRAPHS
from forerun_export.progress import Report, silent

PART = "mutants"
DRAFT_LENGTH, POSITIONS = 2, 3
VOCABULARIES = (5,)
ROWS, ROUNDS = 128, 3
# Texts that repeat themselves, so that a penalty has something to do.
PROMPTS = ("Repeat the word apple many times.", "Count from one to thirty.")
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 1.0}


def mutants(decoder: Decoder, *, samples: int, report: Report = silent) -> Iterator[Finding]:
    """A finding for each mutant. `samples` is the size of part 3, whose power to see it is told as well."""
    report("Injecting mutants", 0, 3)
    for mutant in rule_mutants():
        yield _enumerated(mutant, samples)
    report("Injecting mutants", 1, 3)
    for name in WRONG_GRAPHS:
        yield _compared(name)
    report("Injecting mutants", 2, 3)
    yield _host(decoder)


def _enumerated(mutant: RuleMutant, samples: int) -> Finding:
    wrong = joint_law(mutant.target, mutant.draft, mutant.rule, draft_length=DRAFT_LENGTH, positions=POSITIONS)
    right = plain_law(mutant.target, positions=POSITIONS)
    variation = total_variation(wrong, right)
    distance = sum((wrong.get(key, 0.0) - p) ** 2 / p for key, p in right.items())
    degrees = len(right) - 1
    power = chi_square_tail(critical_value(degrees), degrees, samples * distance)
    needed = needed_noncentrality(degrees) / distance if distance else float("inf")
    return Finding(
        part=PART,
        shown=f"{mutant.name} (rule)",
        figure=f"caught by enumeration: total variation {variation:.4f}",
        power=f"a G-test needs {needed:.0f} samples; {samples} have power {power:.2f}",
        status=verdict(variation > TOLERANCE),  # exact: a mutant that is not seen is none
        numbers={
            "mutant": mutant.name,
            "caught_by": "enumeration",
            "total_variation": variation,
            "g_test_samples": needed,
            "g_test_power": power,
        },
    )


def _compared(name: str) -> Finding:
    found = wrong_graph(name)
    return Finding(
        part=PART,
        shown=f"{name} (graph)",
        figure=f"caught by the oracle: {found.unexplained} of {found.cases} decisions differ",
        power=f"one wrong decision of {found.cases}",
        status=_caught(found.unexplained > 0),
        numbers={
            "mutant": name,
            "caught_by": "graphs",
            "differences": found.unexplained,
            "cases": found.cases,
        },
    )


def wrong_graph(name: str) -> Tally:
    """How the comparison with the oracle takes a wrong graph in the place of verify-residual."""
    sets = [FreshGraphs(size, {"verify-residual": WRONG_GRAPHS[name]}) for size in VOCABULARIES]
    return tally(DECISIONS["verify-residual"], sets, rows=ROWS, rounds=ROUNDS)


def _host(decoder: Decoder) -> Finding:
    name = "penalties counted once a round"
    if decoder.draft is None:
        return Finding(part=PART, shown=f"{name} (host code)", figure="no draft here", power="", status="not shown")
    prompts = [tuple(decoder.tokenizer.chat([{"role": "user", "content": text}])) for text in PROMPTS]
    clean = list(splits(decoder, prompts, [None], PENALTIES))
    with _penalties_once_a_round():
        found = list(splits(decoder, prompts, [None], PENALTIES))
    return Finding(
        part=PART,
        shown=f"{name} (host code)",
        figure=f"caught by greedy equality: {len(found)} texts differ, {len(clean)} without the mutant",
        power="one changed token in any text",
        status="fail" if clean else _caught(bool(found)),
        numbers={"mutant": name, "caught_by": "greedy equality", "differences": len(found)},
    )


@contextlib.contextmanager
def _penalties_once_a_round() -> Iterator[None]:
    """Every place of a round gets the edits of the round's first."""
    right = Row.edits_at

    def wrong(row: Row, drafted: Sequence[int]) -> PlaceEdits:
        return right(row, ())

    Row.edits_at = wrong  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Row.edits_at = right  # type: ignore[method-assign]


def _caught(seen: bool) -> Status:
    return "pass" if seen else "below power"
