"""Part 1: the laws of acceptance enumerated in float64. No sampling, so no sampling error.

What a law emits over several rounds is summed over all proposals, accepted counts and next tokens, and compared with
what the target emits alone.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from forerun.oracle import (
    Law,
    Outcome,
    Rule,
    Table,
    Tokens,
    acceptance_probability,
    argmax,
    block_rule,
    coupled_rule,
    expected_accepted,
    expected_tokens,
    joint_law,
    match_probability,
    one_hot,
    plain_law,
    residual_rule,
    total_variation,
)
from forerun_export.certify.report import Finding, verdict
from forerun_export.certify.tables import SIZES, Pair, Size, certain_pairs, pairs, point_pairs
from forerun_export.progress import Report, silent

PART = "enumeration"
TOLERANCE = 1e-12
BLOCK_OF_TWO = 2  # so that a race between blocks and one within them are both seen at V = 3


def greedy_rule(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
    """Accept while the proposal is the argmax, then emit that; p is one-hot."""
    best = [argmax(p) for p in p_rows]
    n = next((n for n, x in enumerate(proposals) if x != best[n]), len(proposals))
    sure = one_hot(best[n], len(p_rows[n]))
    return [Outcome(float(count == n), sure) for count in range(len(proposals) + 1)]


def coupled_in_blocks(p_rows: Sequence[Law], q_rows: Sequence[Law], proposals: Tokens) -> list[Outcome]:
    """`coupled` with blocks of two tokens."""
    return coupled_rule(p_rows, q_rows, proposals, block_length=BLOCK_OF_TWO)


Pairs = Callable[..., Iterator[Pair]]
RULES: Mapping[str, tuple[Rule, Pairs]] = {
    "residual": (residual_rule, pairs),
    "block": (block_rule, pairs),
    "coupled": (coupled_in_blocks, pairs),
    "point proposals": (residual_rule, point_pairs),
    "greedy": (greedy_rule, certain_pairs),
}
ONE_TOKEN = (Size(1, 1, 3), Size(1, 4, 6))


class Worst(NamedTuple):
    """The largest of some numbers, and where it was found."""

    value: float
    where: str


def enumeration(*, seeds: int = 4, report: Report = silent) -> Iterator[Finding]:
    """Every law's joint law, then the identities that the literature states."""
    for done, (name, (rule, make)) in enumerate(RULES.items()):
        report("Enumerating laws", done, len(RULES) + 1)
        yield _joint(name, rule, make, seeds if name != "coupled" else max(1, seeds // 2))
    report("Enumerating laws", len(RULES), len(RULES) + 1)
    yield _acceptance_of_residual(seeds)
    yield _acceptance_of_coupled(seeds)
    yield _block_is_no_worse(seeds)
    yield _expected_tokens()


def deviation(pair: Pair, rule: Rule, size: Size) -> float:
    """Total variation between the joint law of speculative and of plain decoding."""
    emitted = joint_law(pair.target, pair.draft, rule, draft_length=size.draft_length, positions=size.positions)
    return total_variation(emitted, plain_law(pair.target, positions=size.positions))


def _joint(name: str, rule: Rule, make: Pairs, seeds: int) -> Finding:
    found = [
        Worst(deviation(pair, rule, size), f"{pair.name}, V={size.vocabulary}, K={size.draft_length}")
        for size in (*SIZES, *(ONE_TOKEN if make is not certain_pairs else ONE_TOKEN[:1]))
        for pair in make(size.vocabulary, seeds=seeds)
        if size.vocabulary > 1 or pair.name != "disjoint supports"
    ]
    worst = max(found)
    return Finding(
        part=PART,
        shown=f"{name}: joint law of 3 to 6 tokens, over round boundaries, K = 1..4, is the target's",
        figure=f"total variation {worst.value:.1e} at most, {len(found)} pairs of tables",
        power=f"any bias above {TOLERANCE:.0e}",
        status=verdict(worst.value <= TOLERANCE),
        numbers={"law": name, "total_variation": worst.value, "worst": worst.where, "tables": len(found)},
    )


def _contexts(pair: Pair) -> Iterator[Tokens]:
    for length in range(3):
        yield from itertools.product(range(pair.vocabulary), repeat=length)


def _acceptance_of_residual(seeds: int) -> Finding:
    def error(pair: Pair, context: Tokens) -> float:
        accepted = expected_accepted(pair.target, pair.draft, residual_rule, draft_length=1, context=context)
        return abs(accepted - acceptance_probability(pair.target(context), pair.draft(context)))

    return _identity("residual accepts a proposal with probability sum min(p, q)", error, seeds)


def _acceptance_of_coupled(seeds: int) -> Finding:
    def error(pair: Pair, context: Tokens) -> float:
        accepted = expected_accepted(pair.target, pair.draft, coupled_rule, draft_length=1, context=context)
        return abs(accepted - match_probability(pair.target(context), pair.draft(context)))

    return _identity(
        "coupled accepts with probability sum over i of 1 / sum over j of max(p_j/p_i, q_j/q_i)", error, seeds
    )


def _identity(claim: str, error: Callable[[Pair, Tokens], float], seeds: int) -> Finding:
    errors = [error(pair, context) for pair in pairs(3, seeds=seeds) for context in _contexts(pair)]
    return Finding(
        part=PART,
        shown=claim,
        figure=f"off by {max(errors):.1e} at most, {len(errors)} pairs of laws",
        power=f"any error above {TOLERANCE:.0e}",
        status=verdict(max(errors) <= TOLERANCE),
        numbers={"identity": claim, "error": max(errors), "laws": len(errors)},
    )


def _block_is_no_worse(seeds: int) -> Finding:
    gains = []
    for length in range(1, 5):
        for pair in pairs(3, seeds=seeds):
            of_block, of_residual = (
                expected_accepted(pair.target, pair.draft, rule, draft_length=length)
                for rule in (block_rule, residual_rule)
            )
            gains.append(of_block - of_residual)
    return Finding(
        part=PART,
        shown="block accepts no fewer tokens on average than residual (K = 1..4)",
        figure=f"{min(gains):+.1e} to {max(gains):+.3f} tokens a round, {len(gains)} tables",
        power=f"any loss above {TOLERANCE:.0e}",
        status=verdict(min(gains) >= -TOLERANCE),
        numbers={"least_gain": min(gains), "largest_gain": max(gains), "tables": len(gains)},
    )


def _always(law: Law) -> Table:
    return lambda context: law


def _expected_tokens() -> Finding:
    errors = []
    for p, q in (((0.5, 0.3, 0.2), (0.2, 0.3, 0.5)), ((0.9, 0.1, 0.0), (0.6, 0.2, 0.2)), ((0.5, 0.5), (0.5, 0.5))):
        for length in range(1, 5):
            accepted = expected_accepted(_always(p), _always(q), residual_rule, draft_length=length)
            formula = expected_tokens(acceptance_probability(p, q), length)
            errors.append(abs(accepted + 1 - formula))
    return Finding(
        part=PART,
        shown="tokens a round at constant acceptance a: (1 - a^(K+1)) / (1 - a) (Leviathan et al. 2211.17192)",
        figure=f"off by {max(errors):.1e} at most, K = 1..4",
        power=f"any error above {TOLERANCE:.0e}",
        status=verdict(max(errors) <= TOLERANCE),
        numbers={"error": max(errors)},
    )
