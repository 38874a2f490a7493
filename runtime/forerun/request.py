"""Prompts, and what they become: a request with its controls, then token ids that an engine can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.controls import Controls, make_controls
from forerun.edits import EditRules
from forerun.errors import RequestError
from forerun.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
"""Text, token ids, or chat messages ({"role": .., "content": ..})."""


@dataclass(frozen=True)
class Request:
    """A prompt with its own controls, for batches whose rows differ."""

    prompt: Prompt
    controls: Controls = field(default_factory=Controls)

    @classmethod
    def of(cls, prompt: Prompt, **controls: object) -> Request:
        """A request from a prompt and `Controls` by keyword. Raises RequestError for what means nothing."""
        return cls(prompt, make_controls(controls))


def as_request(prompt: Prompt | Request, controls: Mapping[str, object]) -> Request:
    """The prompt as a request; one that is a request already keeps its own controls."""
    return prompt if isinstance(prompt, Request) else Request(prompt, make_controls(controls))


def is_batch(prompts: Any) -> bool:
    """Whether it is a list of prompts; lists of token ids and of chat messages are one prompt.

    Raises RequestError for what is neither a prompt nor a list of them.
    """
    if isinstance(prompts, str | Request):
        return False
    if isinstance(prompts, Sequence) and prompts:
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompts):
            return False
        if all(isinstance(item, Mapping) for item in prompts):
            return False
        if all(isinstance(item, str | Request | Sequence) for item in prompts):
            return True
    raise RequestError(
        "a prompt is a text, a list of token ids or a list of chat messages, and a batch is a list of prompts; "
        f"got {type(prompts).__name__}" + (" with nothing in it" if not prompts else "")
    )


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer, *, raw: bool) -> list[int]:
    """Token ids of a prompt. Text goes through the chat template as a user's message, unless `raw`."""
    if isinstance(prompt, str):
        if raw:
            return tokenizer.encode(prompt)
        return tokenizer.chat([{"role": "user", "content": prompt}])
    if prompt and isinstance(prompt[0], Mapping):
        return tokenizer.chat(prompt)  # type: ignore[arg-type]  # all are messages, as `is_batch` has seen
    return list(prompt)  # type: ignore[arg-type]


def check_tokens(tokens: Sequence[int], *, vocabulary_size: int, context: int) -> None:
    """Raises RequestError for a prompt that no row could hold."""
    if not tokens:
        raise RequestError("the prompt is empty; give at least one token to continue from")
    if wrong := [token for token in tokens if not (isinstance(token, int) and 0 <= token < vocabulary_size)]:
        raise RequestError(f"token {wrong[0]!r} is not in the vocabulary; ids go from 0 to {vocabulary_size - 1}")
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
