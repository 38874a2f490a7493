"""What a request may ask for; each is checked once, here, before any work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from forerun.errors import RequestError
from forerun.randomness import SEED_BITS

DraftName = Literal["auto", "model", "none"]
LawName = Literal["auto", "residual", "greedy"]


@dataclass(frozen=True, kw_only=True)
class Controls:
    """How one request is decoded. Raises RequestError for a value that means nothing.

    temperature: 0 takes the most likely token (law `greedy`); above 0 logits are divided by it.
    max_new_tokens: tokens emitted at the most; the context may end the text earlier.
    seed: 0 <= seed < 2^64; None takes a fresh one, which `Generation.seed` tells.
    stop: texts that end the output; they are not part of it.
    law: rule of acceptance; `auto` is `greedy` at temperature 0 and `residual` above.
    draft: what proposes tokens; `none` is plain decoding, `auto` the engine directory's draft if it has one.
    draft_length: K, tokens proposed in a round; None is `DEFAULT_DRAFT_LENGTH`. 0 is plain decoding.
    raw: the prompt is text to continue, not a user's message for the chat template.
    """

    temperature: float = 0.0
    max_new_tokens: int = 256
    seed: int | None = None
    stop: Sequence[str] = ()
    law: LawName = "auto"
    draft: DraftName = "auto"
    draft_length: int | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, minimum=0)
        _check_integer("max_new_tokens", self.max_new_tokens, minimum=1)
        if self.seed is not None:
            _check_integer("seed", self.seed, minimum=0, below=2**SEED_BITS)
        if self.draft_length is not None:
            _check_integer("draft_length", self.draft_length, minimum=0)
        _check_choice("law", self.law, get_args(LawName))
        _check_choice("draft", self.draft, get_args(DraftName))
        self._check_stop()
        if self.law == "greedy" and self.temperature > 0:
            raise RequestError(
                "law greedy needs temperature 0; leave the law to auto or set the temperature to 0"
            )

    def _check_stop(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise RequestError(
                "stop: an empty text would end every output at once; give texts of a character or more"
            )
        object.__setattr__(self, "stop", tuple(stop))

    @property
    def law_name(self) -> str:
        """The law that `auto` stands for."""
        if self.law != "auto":
            return self.law
        return "greedy" if self.temperature == 0 else "residual"


def make_controls(options: Mapping[str, object]) -> Controls:
    """Controls from keyword options. Raises RequestError for an unknown one, and lists the known."""
    known = [field.name for field in dataclasses.fields(Controls)]
    if unknown := [name for name in options if name not in known]:
        raise RequestError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
    return Controls(**options)  # type: ignore[arg-type]  # each value is checked by Controls


def _check_number(name: str, value: object, *, minimum: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}; give a finite number of at least {minimum}")
    if value < minimum:
        raise RequestError(f"{name} is {value}; give a number of at least {minimum}")


def _check_integer(name: str, value: object, *, minimum: int, below: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; give a whole number")
    if value < minimum or (below is not None and value >= below):
        bounds = f"of at least {minimum}" + (f" and below {below}" if below is not None else "")
        raise RequestError(f"{name} is {value}; give a whole number {bounds}")


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise RequestError(f"unknown {name} {value!r}; known: {', '.join(known)}")
