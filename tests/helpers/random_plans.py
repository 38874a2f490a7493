"""Plans that no cost explains: each row takes any draft and any length, anew in every round."""

import random
from collections.abc import Mapping

from forerun import Decoder
from forerun.planning import PLAIN, Choice, Plan
from forerun.row import Row


class RandomPlanner:
    """In place of a decoder's planner; `used` counts what it chose."""

    def __init__(self, decoder: Decoder, seed: int) -> None:
        self._drafts = decoder.scheduler._loop.drafts
        self._random = random.Random(seed)
        self.used: dict[str | None, int] = {}

    def plan(self, rows: Mapping[int, Row]) -> Plan:
        choices = [self._choice(index, row) for index, row in rows.items()]
        for choice in choices:
            self.used[choice.draft] = self.used.get(choice.draft, 0) + 1
        return Plan(tuple(choices))

    def observe(self, *_: object) -> None:
        """What rounds take changes nothing."""

    def _choice(self, index: int, row: Row) -> Choice:
        room = row.proposals_wanted()
        if room <= 0 or not row.drafts:
            return PLAIN
        draft = self._random.choice(list(row.drafts))
        most = len(self._drafts[draft].outlook(index, room))
        length = self._random.randint(0, most)
        return Choice(draft, length) if length else PLAIN


def plan_at_random(decoder: Decoder, *, seed: int) -> RandomPlanner:
    """Make a decoder plan at random from now on."""
    planner = RandomPlanner(decoder, seed)
    decoder.scheduler._loop.planner = planner  # type: ignore[assignment]
    return planner
