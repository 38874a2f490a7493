"""The laws of acceptance: which verification carries each of them.

The formulas live in the graphs (export side, `forerun_export.sampling`) and, in plain Python, in `forerun.oracle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.row import Row


@dataclass(frozen=True)
class Law:
    """A rule of acceptance. `verify` names its graph, `verify_points` that for proposals which were not drawn.

    `samples`: whether it draws from laws; `coupled`: whether draws are keyed races, the same in plain decoding.
    """

    name: str
    verify: str
    verify_points: str
    samples: bool = True
    coupled: bool = False

    def verification(self, *, points: bool) -> str:
        """The graph that decides on proposals."""
        return self.verify_points if points else self.verify


LAWS: Mapping[str, Law] = {
    law.name: law
    for law in (
        Law("residual", "verify-residual", "verify-points"),
        Law("block", "verify-block", "verify-points"),
        Law("coupled", "verify-coupled", "verify-coupled", coupled=True),
        Law("greedy", "verify-greedy", "verify-greedy", samples=False),
    )
}
GREEDY = LAWS["greedy"]


@dataclass(frozen=True)
class Demands:
    """What the rows of a batch ask for, taken together: the graphs that a round runs.

    At temperature 0 p and q are one-hot, so that every sampling law *is* `greedy`: among sampled rows, greedy ones
    run under whichever law is there.
    """

    laws: tuple[Law, ...]
    filters: bool
    edits: bool
    logprobs: bool

    @property
    def samples(self) -> bool:
        """Whether any row draws from a law; if none does, no law is made."""
        return self.laws[0].samples

    def law_of(self, row: Row) -> Law:
        """The law among `laws` that decides for a row."""
        return row.law if row.law in self.laws else self.laws[0]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Demands:
        """The demands of these rows."""
        sampled = sorted({row.law.name for row in rows if row.law.samples})
        return cls(
            laws=tuple(LAWS[name] for name in sampled) or (GREEDY,),
            filters=any(row.controls.filters for row in rows),
            edits=any(row.edits is not None for row in rows),
            logprobs=any(row.controls.logprobs is not None for row in rows),
        )
