"""Plans: the draft length that pays, for one row and for a batch, and what never depends on the clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from forerun.costs import Costs, Curve
from forerun.laws import LAWS, Law
from forerun.planning import PLAIN, Choice, Planner


@dataclass
class Outlook:
    """A draft that says how likely its proposals are, row by row."""

    chances: Mapping[int, Sequence[float]]

    def outlook(self, row: int, most: int) -> Sequence[float]:
        return list(self.chances.get(row, ()))[:most]


@dataclass
class AnyRow:
    """What a planner looks at."""

    drafts: Sequence[str] = ("model", "ngram")
    adaptive: bool = True
    room: int = 8
    law: Law = field(default_factory=lambda: LAWS["greedy"])

    def proposals_wanted(self) -> int:
        return self.room


def costs_of(*, target: Sequence[float], draft: float = 1.0) -> Costs:
    """Seconds of verifying 1, 2, .. tokens, and of a draft step."""
    small = Curve((1,), (1e-6,))
    curve = Curve(tuple(range(1, len(target) + 1)), tuple(target))
    return Costs(
        target=curve,
        draft=Curve((1,), (draft,)),
        draw_greedy=small,
        draw_sampled=small,
        accept_greedy=small,
        accept_sampled=small,
    )


FLAT = [10.0] * 9  # more tokens cost nothing
STEEP = [10.0 * tokens for tokens in range(1, 10)]  # two tokens cost as much as two calls


def plan(
    rows: Sequence[AnyRow],
    costs: Costs,
    *,
    model: Mapping[int, Sequence[float]] | None = None,
    ngram: Mapping[int, Sequence[float]] | None = None,
) -> tuple[Choice, ...]:
    drafts = {"model": Outlook(model or {}), "ngram": Outlook(ngram or {})}
    return Planner(drafts, lambda: costs).plan(dict(enumerate(rows))).choices  # type: ignore[arg-type]


def test_where_verifying_is_free_every_likely_proposal_is_made() -> None:
    assert plan([AnyRow()], costs_of(target=FLAT, draft=0.01), model={0: [0.9] * 8}) == (Choice("model", 8),)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.9])
def test_where_verifying_costs_as_much_as_decoding_nothing_is_proposed(chance: float) -> None:
    assert plan([AnyRow()], costs_of(target=STEEP), model={0: [chance] * 8}, ngram={0: [chance] * 8}) == (PLAIN,)


def test_a_draft_that_is_always_wrong_is_not_asked() -> None:
    assert plan([AnyRow()], costs_of(target=FLAT), model={0: [0.0] * 8}) == (PLAIN,)


def test_the_draft_length_is_the_fastest_one() -> None:
    """Against every draft length worked out by hand: tokens a second of 1 + a + a^2 + .. tokens."""
    target, draft_s, chance = [10.0, 12.0, 13.0, 15.0, 18.0, 22.0, 27.0, 33.0, 40.0], 2.0, 0.8

    def speed(length: int) -> float:
        return sum(chance**place for place in range(length + 1)) / (target[length] + length * draft_s)

    best = max(range(9), key=speed)
    assert 0 < best < 8
    found = plan([AnyRow()], costs_of(target=target, draft=draft_s), model={0: [chance] * 8})
    assert found == (Choice("model", best),)


def test_of_two_drafts_the_one_that_costs_nothing_proposes_where_it_is_as_good() -> None:
    costs = costs_of(target=FLAT, draft=3.0)
    assert plan([AnyRow()], costs, model={0: [0.8] * 8}, ngram={0: [0.8] * 4})[0].draft == "ngram"
    assert plan([AnyRow()], costs, model={0: [0.8] * 8}, ngram={0: [0.05] * 4})[0].draft == "model"


def test_each_row_of_a_batch_has_its_own_draft_and_length() -> None:
    costs = costs_of(target=[10.0 + tokens / 100 for tokens in range(40)], draft=0.1)
    found = plan(
        [AnyRow(), AnyRow(room=2), AnyRow(drafts=()), AnyRow()],
        costs,
        model={0: [0.9] * 8, 1: [0.9] * 8, 3: [0.01] * 8},
        ngram={3: [0.95] * 5},
    )
    assert found == (Choice("model", 8), Choice("model", 2), PLAIN, Choice("ngram", 5))


def test_the_batch_as_a_whole_decides_what_a_wider_verification_is_worth() -> None:
    """One row alone would propose; beside seven that have nothing to propose, the wider call costs too much."""
    costs = costs_of(target=[10.0 + 0.9 * tokens for tokens in range(1, 80)], draft=0.01)
    hopeful = {0: [0.6]}
    assert plan([AnyRow()], costs, ngram=hopeful) == (Choice("ngram", 1),)
    assert plan([AnyRow()] + [AnyRow(drafts=())] * 7, costs, ngram=hopeful) == (PLAIN,) * 8


def test_fixed_rows_ignore_costs_and_keep_their_draft_and_length() -> None:
    def no_costs() -> Costs:
        pytest.fail("costs were asked for")

    drafts = {"model": Outlook({0: [0.01] * 8}), "ngram": Outlook({1: [0.01] * 2})}
    rows = {0: AnyRow(("model",), adaptive=False, room=5), 1: AnyRow(("ngram",), adaptive=False, room=5)}
    planner = Planner(drafts, no_costs)  # type: ignore[arg-type]
    assert planner.plan(rows).choices == (Choice("model", 5), Choice("ngram", 2))  # type: ignore[arg-type]


def test_a_fixed_row_keeps_its_length_beside_an_adaptive_one() -> None:
    rows = [AnyRow(("model",), adaptive=False, room=3), AnyRow()]
    found = plan(rows, costs_of(target=STEEP), model={0: [0.5] * 8, 1: [0.0] * 8})
    assert found == (Choice("model", 3), PLAIN)


def test_at_the_end_of_a_sequence_nothing_is_proposed() -> None:
    assert plan([AnyRow(room=0)], costs_of(target=FLAT), model={0: [0.9] * 8}) == (PLAIN,)
