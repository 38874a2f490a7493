"""What each row proposes in a round: from which draft, and how many tokens.

    m             steps of the draft model, in lockstep for the whole batch
    w             proposals that the target verifies, in the row that has most
    outlook       of a draft, for a row: how likely each proposal is accepted, given that those before it were

A round takes what the draft model's m steps and a verification of w proposals take, and emits 1 + the accepted of each
row. The plan is the (m, w) with most tokens a second for the batch as a whole; w = 0 is plain decoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from forerun.costs import Costs, RoundShape, RunningCosts
from forerun.draft import Draft
from forerun.row import Row


@dataclass(frozen=True, slots=True)
class Choice:
    """What one row proposes: K = `length` tokens of `draft`, none of None."""

    draft: str | None
    length: int


PLAIN = Choice(None, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A round's choices, row by row."""

    choices: tuple[Choice, ...]

    @property
    def width(self) -> int:
        """w: proposals of the row that has most."""
        return max(choice.length for choice in self.choices)

    def lengths(self, draft: str | None = None) -> list[int]:
        """Each row's K, or how much of it this draft proposes: all or nothing."""
        return [choice.length if draft in (None, choice.draft) else 0 for choice in self.choices]


@dataclass(frozen=True, slots=True)
class _Prospect:
    """Tokens that a row may expect to have accepted: `model[k]` and `ngram[k]` of k proposals of either draft.

    `fixed` is its choice where that depends on nothing else.
    """

    model: tuple[float, ...]
    ngram: tuple[float, ...]
    fixed: Choice | None = None

    def best(self, steps: int, width: int) -> tuple[float, Choice]:
        """Accepted tokens and choice, where the model makes `steps` steps and `width` proposals are verified."""
        if self.fixed is not None:
            return (self.ngram if self.fixed.draft == "ngram" else self.model)[self.fixed.length], self.fixed
        of_model = min(steps, len(self.model) - 1)
        of_ngram = min(width, len(self.ngram) - 1)
        if self.ngram[of_ngram] >= self.model[of_model]:
            return self.ngram[of_ngram], Choice("ngram", of_ngram) if of_ngram else PLAIN
        return self.model[of_model], Choice("model", of_model)


class Planner:
    """Plans rounds. `costs` is asked on the first round that has a choice."""

    def __init__(self, drafts: Mapping[str, Draft], costs: Callable[[], Costs]) -> None:
        self._drafts = drafts
        self._measure = costs

    @cached_property
    def _costs(self) -> RunningCosts:
        return RunningCosts(self._measure())

    def plan(self, rows: Mapping[int, Row]) -> Plan:
        """The plan of a round for these rows of the batch, by their index."""
        prospects = [self._prospect(index, row) for index, row in rows.items()]
        if all(prospect.fixed is not None for prospect in prospects):
            return Plan(tuple(prospect.best(0, 0)[1] for prospect in prospects))
        return self._fastest(prospects, samples=any(row.law.samples for row in rows.values()))

    def observe(self, rows: Sequence[Row], plan: Plan, seconds: float) -> None:
        """A round of this plan has taken so long."""
        if any(row.adaptive and row.drafts for row in rows):
            samples = any(row.law.samples for row in rows)
            self._costs.observe(RoundShape(len(rows), max(plan.lengths("model")), plan.width, samples), seconds)

    def _prospect(self, index: int, row: Row) -> _Prospect:
        room = row.proposals_wanted()
        outlooks = {name: self._drafts[name].outlook(index, room) for name in row.drafts} if room > 0 else {}
        model, ngram = outlooks.get("model", ()), outlooks.get("ngram", ())
        prospect = _Prospect(_accepted(model), _accepted(ngram))
        if not model and not ngram:
            return replace(prospect, fixed=PLAIN)
        if row.adaptive:
            return prospect
        return replace(prospect, fixed=Choice("model", len(model)) if model else Choice("ngram", len(ngram)))

    def _fastest(self, prospects: Sequence[_Prospect], *, samples: bool) -> Plan:
        rows = len(prospects)
        fixed = Plan(tuple(prospect.fixed or PLAIN for prospect in prospects))
        fewest_steps = max(fixed.lengths("model"))
        most_steps = max(len(prospect.model) for prospect in prospects) - 1
        widest = max(len(prospect.ngram) for prospect in prospects) - 1
        best_speed, best = 0.0, (0, 0)
        for steps in range(fewest_steps, most_steps + 1):
            narrowest = max(steps, fixed.width)
            for width in range(narrowest, max(widest, narrowest) + 1):
                accepted = sum(prospect.best(steps, width)[0] for prospect in prospects)
                speed = (rows + accepted) / self._costs.round_s(RoundShape(rows, steps, width, samples))
                if speed > best_speed:
                    best_speed, best = speed, (steps, width)
        return Plan(tuple(prospect.best(*best)[1] for prospect in prospects))


def _accepted(outlook: Sequence[float]) -> tuple[float, ...]:
    """Expected accepted tokens of the first 0, 1, 2, .. proposals, which are tested one after another."""
    reached = itertools.accumulate(outlook, lambda before, probability: before * probability, initial=1.0)
    return (0.0, *itertools.accumulate(itertools.islice(reached, 1, None)))
