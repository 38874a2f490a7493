"""Prompts, and what they become: a request with its controls, then token ids that an engine can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.controls import Controls, make_controls
from forerun.edits import EditRules
from forerun.errors import RequestError
from forerun.tokenizer import Tokenizer
from forerun.values import BYTES, check_text, integer, is_sequence, list_of, shown

_WANTED = "a prompt is a text, a list of token ids or a list of chat messages, and a batch is a list of prompts"

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
"""Text, token ids, or chat messages ({"role": .., "content": ..})."""


class TokenArray(Protocol):
    """Token ids in an array, of NumPy, torch or Python: one dimension is a prompt, two are a batch of its rows."""

    def tolist(self) -> Any:
        """Its numbers as lists."""


@dataclass(frozen=True)
class Request:
    """A prompt with its own controls, for batches whose rows differ. Raises RequestError for what is no prompt."""

    prompt: Prompt
    controls: Controls = field(default_factory=Controls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _as_prompt(self.prompt))

    @classmethod
    def of(cls, prompt: Prompt | TokenArray, **controls: object) -> Request:
        """A request from a prompt and `Controls` by keyword. Raises RequestError for what means nothing."""
        return cls(prompt, make_controls(controls))  # type: ignore[arg-type]  # an array becomes token ids


def as_requests(prompts: Any, controls: Mapping[str, object]) -> tuple[list[Request], bool]:
    """The requests of one prompt or of a batch of them, and whether it is a batch.

    A list of token ids and one of chat messages are one prompt; a request keeps its own controls.
    Raises RequestError for what is neither a prompt nor a list of them.
    """
    if isinstance(prompts, Request):
        return [prompts], False
    if is_sequence(prompts):
        items = list_of(prompts)
        if not items:
            raise RequestError(f"{_WANTED}; got {type(prompts).__name__} with nothing in it")
        if _is_batch(items):
            return [as_request(prompt, controls) for prompt in items], True
    return [as_request(prompts, controls)], False


def as_request(prompt: Prompt | Request, controls: Mapping[str, object]) -> Request:
    """The prompt as a request; one that is a request already keeps its own controls."""
    return prompt if isinstance(prompt, Request) else Request(prompt, make_controls(controls))


def _is_batch(items: Sequence[object]) -> bool:
    return all(isinstance(item, (str, Request, *BYTES)) or is_sequence(item) for item in items)


def _as_prompt(prompt: Any) -> Prompt:
    """The prompt with plain token ids. Raises RequestError, saying what was given, for anything else."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, BYTES):
        raise RequestError(
            f"the prompt is {type(prompt).__name__}, neither text nor token ids; "
            "give prompt.decode() for text, or list(prompt) for ids"
        )
    if is_sequence(prompt):
        items = list_of(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return tuple(items)
        return _as_tokens(items)
    raise RequestError(f"{_WANTED}; got {type(prompt).__name__}")


def _as_tokens(items: Sequence[object]) -> tuple[int, ...]:
    tokens = [integer(item) for item in items]
    if None in tokens:
        wrong = tokens.index(None)
        raise RequestError(f"{_WANTED}; got a list whose item {wrong} is {shown(items[wrong])}")
    return tuple(token for token in tokens if token is not None)


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer, controls: Controls) -> list[int]:
    """Token ids of a prompt. Text goes through the chat template as a user's message, unless it is `raw`.

    Raises RequestError for text that is no Unicode, and for what the chat template refuses.
    """
    if isinstance(prompt, str):
        check_text("the prompt", prompt)
        if controls.raw:
            return tokenizer.encode(prompt)
        prompt = [{"role": "user", "content": prompt}]
    if prompt and isinstance(prompt[0], Mapping):
        messages: Any = prompt  # all are, as `Request` has seen
        return tokenizer.chat(
            messages, template_arguments=controls.template_arguments, parse_special=controls.parse_special
        )
    if controls.template_arguments:
        raise RequestError("template_arguments: token ids go through no chat template; leave the arguments out")
    return list(prompt)  # type: ignore[arg-type]  # token ids, then


def check_tokens(tokens: Sequence[int], *, vocabulary_size: int, context: int) -> None:
    """Raises RequestError for a prompt that no row could hold."""
    if not tokens:
        raise RequestError("the prompt is empty; give at least one token to continue from")
    if wrong := [token for token in tokens if not 0 <= token < vocabulary_size]:
        raise RequestError(f"token {wrong[0]} is not in the vocabulary; ids go from 0 to {vocabulary_size - 1}")
    if len(tokens) >= context:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, which leaves no room in a context of {context}; "
            "shorten it or export with a larger --context"
        )


def edit_rules(controls: Controls, tokenizer: Tokenizer, *, vocabulary_size: int) -> EditRules:
    """The controls that edit logits, with texts turned to tokens. Raises RequestError for what cannot be honoured."""
    named = {
        "logit_bias": list(controls.logit_bias),
        "stop_tokens": controls.stop_tokens,
        "bad_words": [token for word in controls.bad_words if not isinstance(word, str) for token in word],
    }
    for name, tokens in named.items():
        if wrong := [token for token in tokens if not 0 <= token < vocabulary_size]:
            raise RequestError(f"{name}: token {wrong[0]} is not in the vocabulary of {vocabulary_size}")
    if controls.force_end and tokenizer.end_token is None:
        raise RequestError("force_end: this model has no end token; leave it out")
    return EditRules(
        repetition_penalty=controls.repetition_penalty,
        presence_penalty=controls.presence_penalty,
        frequency_penalty=controls.frequency_penalty,
        no_repeat_ngram=controls.no_repeat_ngram,
        bias=controls.logit_bias,
        bad_words=tuple(tokens for word in controls.bad_words for tokens in _spellings(word, tokenizer)),
        min_new_tokens=controls.min_new_tokens,
        end_tokens=tokenizer.end_tokens.union(controls.stop_tokens),
        forced_end=tokenizer.end_token if controls.force_end else None,
    )


def _spellings(word: str | Sequence[int], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """A text as it stands and behind a space, since most vocabularies have other tokens for the two."""
    if not isinstance(word, str):
        return [tuple(word)]
    texts = (word, f" {word}")
    found = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return [tokens for tokens in dict.fromkeys(found) if tokens]
