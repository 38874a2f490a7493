"""How likely a proposal is to be accepted, learnt while decoding.

A *kind* of proposal (a model's; a match of so many tokens) has an acceptance of its own, learnt over all sequences. A
sequence differs from the others by one number, its *offset* on the log-odds scale, learnt over its proposals of
every kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_TESTS = 4.0  # tests that a kind's prior counts for
REMEMBERED_TESTS = 200.0  # a kind's earlier tests fade, so that it follows a change of work
INFORMATION = 0.2  # of one test about the log-odds: a (1 - a) for an acceptance a of about 0.7
REMEMBERED_INFORMATION = 8.0  # a sequence's offset follows what changes within it
OPTIMISTS = 16
"""One sequence of so many starts from the priors: what has been given up is tried again now and then."""


@dataclass
class _Kind:
    """Tests and acceptances of one kind, the prior's among them."""

    prior: float
    accepted: float = 0.0
    tests: float = 0.0

    @property
    def mean(self) -> float:
        return (self.accepted + PRIOR_TESTS * self.prior) / (self.tests + PRIOR_TESTS)

    def learn(self, accepted: bool) -> None:
        fade = 1 - 1 / REMEMBERED_TESTS
        self.accepted = self.accepted * fade + accepted
        self.tests = self.tests * fade + 1


class Acceptance:
    """What is known of each kind over all sequences; `priors` are the acceptances to begin with, between 0 and 1."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._kinds = [_Kind(prior) for prior in priors]
        self._sequences = 0

    def sequence(self) -> SequenceAcceptance:
        """A sequence about which nothing is known yet."""
        optimist = self._sequences % OPTIMISTS == 0
        self._sequences += 1
        return SequenceAcceptance(self._kinds, optimist=optimist)


class SequenceAcceptance:
    """Acceptance within one sequence."""

    def __init__(self, kinds: Sequence[_Kind], *, optimist: bool) -> None:
        self._kinds = kinds
        self._optimist = optimist
        self._offset = 0.0
        self._information = 1.0  # of the prior: offsets have a standard deviation of about 1

    def probability(self, kind: int) -> float:
        """That a proposal of this kind is accepted, given that those before it were."""
        known = self._kinds[kind].prior if self._optimist else self._kinds[kind].mean
        return 1 / (1 + math.exp(-_log_odds(known) - self._offset))

    def learn(self, kinds: Sequence[int], accepted: int) -> None:
        """A round tested proposals of these kinds in their order, and accepted the first `accepted`.

        One step of a Laplace filter each: the offset moves by surprise over information.
        """
        for place, kind in enumerate(kinds[: accepted + 1]):
            is_accepted = place < accepted
            self._information = min(self._information + INFORMATION, REMEMBERED_INFORMATION)
            self._offset += (is_accepted - self.probability(kind)) / self._information
            self._kinds[kind].learn(is_accepted)


def _log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))
