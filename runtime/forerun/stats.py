"""What the decoding of one sequence counted and took."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class DraftStats:
    """What one draft proposed."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0

    def count_round(self, *, proposed: int, accepted: int) -> None:
        """Add a round in which this draft proposed."""
        self.rounds += 1
        self.proposed += proposed
        self.accepted += accepted


@dataclass
class Stats:
    """Counts in tokens, times in seconds of wall clock.

    emitted = accepted + corrections + bonuses - truncated, where truncated are tokens that a round gave after the
    sequence's end. `accepted_by_position[i]` counts the rounds that kept the proposal at place i. Times are those of
    the calls that the sequence took part in; `engine_s` is the part of `decode_s` spent inside engines. `by_draft` has
    the rounds of each draft that made proposals, and its proposed and accepted tokens.
    """

    law: str
    draft: str
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    corrections: int = 0
    bonuses: int = 0
    truncated: int = 0
    emitted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    by_draft: dict[str, DraftStats] = field(default_factory=dict)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    engine_s: float = 0.0
    host_bytes: int = 0

    def count_round(self, *, draft: str | None, proposed: int, accepted: int, emitted: int) -> None:
        """Add a round: `accepted` of the draft's `proposed` proposals kept, then a correction or a bonus."""
        if draft is not None:
            self.by_draft.setdefault(draft, DraftStats()).count_round(proposed=proposed, accepted=accepted)
        self.rounds += 1
        self.proposed += proposed
        self.accepted += accepted
        if accepted < proposed:
            self.corrections += 1
        else:
            self.bonuses += 1
        self.emitted += emitted
        self.truncated += accepted + 1 - emitted
        missing = accepted - len(self.accepted_by_position)
        self.accepted_by_position += [0] * missing
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted of proposed tokens; 0 where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per round, that is per call of the target."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of decoding, prefill left out."""
        return self.emitted / self.decode_s if self.decode_s else 0.0

    @property
    def host_bytes_per_round(self) -> float:
        """Bytes that a round moved from the device to the host for this sequence."""
        return self.host_bytes / self.rounds if self.rounds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The `stats` object of `forerun generate --json`."""
        return {
            "rounds": self.rounds,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "corrections": self.corrections,
            "bonuses": self.bonuses,
            "truncated": self.truncated,
            "emitted": self.emitted,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": self.tokens_per_round,
            "accepted_by_position": self.accepted_by_position,
            "by_draft": {draft: asdict(stats) for draft, stats in self.by_draft.items()},
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "engine_s": self.engine_s,
            "tokens_per_s": self.tokens_per_s,
            "host_bytes_per_round": self.host_bytes_per_round,
            "law": self.law,
            "draft": self.draft,
        }
