"""What is asked of an engine, and what came back: tokens, and a stamp for each call of the target."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PHASES = ("target", "draft", "sampling")
"""Kinds of engines whose seconds a round tells apart; what is left of the round is the host's."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt to decode. `law`, `draft` and `draft_length` mean something to forerun only; None is an adaptive K."""

    tokens: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    law: str = "auto"
    draft: str = "none"
    draft_length: int | None = None

    def to_json(self) -> dict[str, Any]:
        """What a worker is sent."""
        return {**asdict(self), "tokens": list(self.tokens)}


@dataclass(frozen=True)
class Round:
    """One call of the target and what led to it.

    `at_s`: seconds from the request until its tokens were there. `proposed`, `accepted`: of the draft's tokens; None
    where the library does not tell. `draft` proposed; None where nothing was proposed, or where that is not known.
    `seconds`: inside the engines of PHASES; None where that is not known.
    """

    at_s: float
    tokens: int
    proposed: int | None = None
    accepted: int | None = None
    draft: str | None = None
    seconds: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Output:
    """The tokens of one decoded prompt and the rounds that made them."""

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]

    def to_json(self) -> dict[str, Any]:
        """What a worker answers."""
        return {"tokens": list(self.tokens), "rounds": [asdict(one) for one in self.rounds]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Output":
        """The inverse of `to_json`."""
        return cls(tuple(data["tokens"]), tuple(Round(**one) for one in data["rounds"]))


@dataclass(frozen=True)
class TimedRound:
    """A round behind the first, with the seconds that it took.

    The first round of a request is not among them: its time is mostly the prompt's.
    """

    taken_s: float
    round: Round


@dataclass(frozen=True)
class Run:
    """One prompt decoded by one engine."""

    engine: str
    category: str
    prompt: int
    prompt_tokens: int
    output: Output

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to the first tokens."""
        return self.output.rounds[0].at_s

    @property
    def decode_s(self) -> float:
        """Seconds of all rounds behind the first."""
        return self.output.rounds[-1].at_s - self.output.rounds[0].at_s

    @property
    def decoded(self) -> int:
        """Tokens of all rounds behind the first."""
        return sum(one.tokens for one in self.output.rounds[1:])

    def timed_rounds(self) -> Iterator[TimedRound]:
        """The rounds that `decode_s` is made of."""
        for before, one in zip(self.output.rounds, self.output.rounds[1:], strict=False):
            yield TimedRound(one.at_s - before.at_s, one)

    def token_times(self) -> Iterator[float]:
        """Seconds of each decoded token: its share of its round."""
        for timed in self.timed_rounds():
            yield from [timed.taken_s / timed.round.tokens] * timed.round.tokens


@dataclass(frozen=True)
class Reading:
    """A prompt of so many tokens that an engine read, and the seconds until the first token behind it."""

    engine: str
    tokens: int
    seconds: float


def median_runs(runs: Sequence[Run]) -> list[Run]:
    """Of each prompt the run of median speed (the faster one of two), in the order of the prompts."""
    kept = []
    for prompt in sorted({run.prompt for run in runs}):
        repeats = sorted((run for run in runs if run.prompt == prompt), key=_seconds_per_token)
        kept.append(repeats[(len(repeats) - 1) // 2])
    return kept


def _seconds_per_token(run: Run) -> float:
    return run.decode_s / run.decoded if run.decoded else run.first_token_s
