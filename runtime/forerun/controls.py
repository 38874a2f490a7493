"""What a request may ask for; each is checked once, here, before any work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from forerun.chat import check_arguments
from forerun.errors import RequestError
from forerun.randomness import SEED_BITS
from forerun.values import (
    BYTES,
    check_flag,
    check_integer,
    check_number,
    check_text,
    is_sequence,
    items,
    list_of,
    number,
    shown,
    token_id,
    token_ids,
)
from forerun.workspace import TOP_LOGPROBS

DraftName = Literal["auto", "model", "ngram", "none"]
LawName = Literal["auto", "residual", "block", "coupled", "greedy"]

LARGEST_EDIT, SMALLEST_PENALTY = 1e9, 1e-9  # what these edit is still a float32 number

_NUMBERS: Mapping[str, Mapping[str, float]] = {
    "temperature": {"minimum": 0},
    "repetition_penalty": {"minimum": SMALLEST_PENALTY, "maximum": LARGEST_EDIT},
    "presence_penalty": {"minimum": -LARGEST_EDIT, "maximum": LARGEST_EDIT},
    "frequency_penalty": {"minimum": -LARGEST_EDIT, "maximum": LARGEST_EDIT},
    "top_p": {"above": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
}
# Integer controls: the least they may be, and what they must be below.
_INTEGERS: Mapping[str, tuple[int, int | None]] = {
    "top_k": (0, 2**31),
    "no_repeat_ngram": (0, None),
    "min_new_tokens": (0, None),
    "max_new_tokens": (1, None),
    "n": (1, None),
    "logprobs": (0, TOP_LOGPROBS + 1),
    "seed": (0, 2**SEED_BITS),
    "draft_length": (0, None),
}
_MAY_BE_NONE = frozenset({"logprobs", "seed", "draft_length"})


@dataclass(frozen=True, kw_only=True)
class Controls:
    """How one request is decoded. Raises RequestError for a value that means nothing.

    In this order logits become the law p that tokens are drawn from; the draft's become q in the same way:

    logit_bias: added to the logits of these tokens; -inf bans one, +inf bans all that have no +inf.
    repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else multiplied.
    presence_penalty, frequency_penalty: subtracted once, and for each time, that the output has the token.
    bad_words: texts or token sequences that never become complete.
    no_repeat_ngram: no n-gram of this size occurs twice in prompt and output; 0 is off.
    min_new_tokens: no end token comes before so many.
    force_end: the last token that max_new_tokens allows is an end token.
    temperature: 0 takes the most likely token; above 0 logits are divided by it.
    top_k: only the k most likely tokens, and those level with the k-th; 0 is off.
    top_p: only the most likely tokens that together reach this probability; 1 is off.
    min_p: only tokens at least this likely, relative to the most likely one; 0 is off.

    The rest says how decoding goes on and when it ends:

    max_new_tokens: tokens emitted at the most; the context may end the text earlier.
    stop, stop_tokens: texts and tokens that end the output. A stop text is not part of it.
    seed: 0 <= seed < 2^64; None takes a fresh one, which `Generation.seed` tells.
    law: rule of acceptance; `auto` is `greedy` at temperature 0 (where all are), else `coupled` if a seed is given,
        which makes the text the same for every draft and draft length, else `block`.
    draft: what proposes tokens; `model` is the engine directory's draft, `ngram` the text itself, `none` plain
        decoding, `auto` round by round whichever of these pays.
    draft_length: K, tokens proposed in a round; 0 is plain decoding. None leaves it to the decoder, which chooses it
        round by round from what it has seen accepted and what calls cost on this machine. With K given, and with a seed
        under a law whose tokens depend on it (residual, block), K and draft stay: `auto` is then the directory's draft
        if it has one, and K = 4 if none is given.
    logprobs: log-probabilities of the emitted tokens, and of so many of the most likely ones; None is off.
    n: samples of the prompt, each with a seed of its own.
    raw: the prompt is text to continue, not a user's message for the chat template. Special tokens that it spells out
        are those tokens.
    template_arguments: what the chat template is given beside the messages: `tools`, `enable_thinking`, .., whatever it
        knows; `add_generation_prompt` (True unless given: the text ends where the answer begins) and
        `continue_final_message` (the text ends with the last message's content, which is to be continued).
    parse_special: special tokens that messages and template arguments spell out ("<|im_end|>") are those tokens, so
        that whoever writes a message may end it and begin another's. Without it they are text; what the template
        writes itself is always parsed.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: Sequence[str | Sequence[int]] = ()
    no_repeat_ngram: int = 0
    min_new_tokens: int = 0
    force_end: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    seed: int | None = None
    law: LawName = "auto"
    draft: DraftName = "auto"
    draft_length: int | None = None
    logprobs: int | None = None
    n: int = 1
    raw: bool = False
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    parse_special: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        _check_choice("law", self.law, get_args(LawName))
        _check_choice("draft", self.draft, get_args(DraftName))
        self._check_sequences()
        self._set("template_arguments", check_arguments(self.template_arguments))
        if self.raw and self.template_arguments:
            raise RequestError(
                "template_arguments: a raw prompt goes through no chat template; leave one of the two out"
            )
        if self.law == "greedy" and self.temperature > 0:
            raise RequestError("law greedy needs temperature 0; leave the law to auto or set the temperature to 0")
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}, above max_new_tokens, {self.max_new_tokens}; lower it"
            )

    def _check_numbers(self) -> None:
        for name, limits in _NUMBERS.items():
            self._set(name, check_number(name, getattr(self, name), **limits))
        for name, (minimum, below) in _INTEGERS.items():
            if (value := getattr(self, name)) is not None or name not in _MAY_BE_NONE:
                self._set(name, check_integer(name, value, minimum=minimum, below=below))
        for name in ("force_end", "raw", "parse_special"):
            self._set(name, check_flag(name, getattr(self, name)))

    def _check_sequences(self) -> None:
        """Also makes a text that stands for a list of one a tuple, and every list one."""
        self._set("stop", tuple(_stop_text(text) for text in _as_list("stop", self.stop, "texts")))
        words = _as_list("bad_words", self.bad_words, "texts or token sequences")
        self._set("bad_words", tuple(_bad_word(word) for word in words))
        self._set("stop_tokens", token_ids("stop_tokens", _as_list("stop_tokens", self.stop_tokens, "token ids")))
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is {shown(self.logit_bias)}; give a mapping from token ids to numbers")
        biases = ((token_id("logit_bias", token), bias) for token, bias in self.logit_bias.items())
        self._set("logit_bias", {token: _bias(token, bias) for token, bias in biases})

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen: what was given becomes plain once, while it is made

    @property
    def law_name(self) -> str:
        """The law that `auto` stands for; at temperature 0 every law is `greedy`."""
        if self.temperature == 0:
            return "greedy"
        if self.law != "auto":
            return self.law
        return "block" if self.seed is None else "coupled"

    @property
    def repeatable(self) -> bool:
        """Whether K may change the tokens of a text that a seed promises to repeat: then it must not depend on time."""
        return self.seed is not None and self.law_name in ("residual", "block")

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p leave any token out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def make_controls(options: Mapping[str, object]) -> Controls:
    """Controls from keyword options. Raises RequestError for an unknown one, and lists the known."""
    known = [field.name for field in dataclasses.fields(Controls)]
    if unknown := [name for name in options if name not in known]:
        raise RequestError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
    return Controls(**options)  # type: ignore[arg-type]  # each value is checked by Controls


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise RequestError(f"unknown {name} {shown(value)}; known: {', '.join(known)}")


def _as_list(name: str, value: object, what: str) -> list[Any]:
    return [value] if isinstance(value, str) else items(name, value, what)


def _stop_text(text: object) -> str:
    if not isinstance(text, str):
        raise RequestError(f"stop: {shown(text)} is no text; give texts")
    if not text:
        raise RequestError("stop: an empty text would end every output at once; give texts of a character or more")
    return check_text("stop", text)


def _bad_word(word: object) -> str | tuple[int, ...]:
    if isinstance(word, str) and word:
        return check_text("bad_words", word)
    if is_sequence(word) and (tokens := list_of(word)):
        return token_ids("bad_words", tokens)
    if isinstance(word, BYTES):
        items("bad_words", word, "texts")  # tells what is wrong with it
    raise RequestError("bad_words: an empty one would ban every token; give texts or token sequences")


def _bias(token: int, value: object) -> float:
    bias = number(value)
    if bias is None or not (abs(bias) <= LARGEST_EDIT or abs(bias) == math.inf):
        raise RequestError(
            f"logit_bias of token {token} is {shown(value)}; give a number of at most 1e9 either way, or +-inf"
        )
    return bias
