"""Controls that depend on what has been said: which logits to edit at one place of one sequence.

Each place inside a drafted run has edits of its own, counted over the committed *and* the drafted tokens before it.
The edits of a place are few tokens with a few numbers; a graph applies them to the logits on the device:

    l = logit + bias;   l = l / penalty if l > 0 else l * penalty;   l = l - shift
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BANNED = float("inf")
"""A shift that leaves no probability."""


class Edit(NamedTuple):
    """What happens to one token's logit; the defaults change nothing."""

    bias: float = 0.0
    penalty: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class PlaceEdits:
    """The edits of one place: by token, and whether every token that is not listed is banned."""

    tokens: Mapping[int, Edit] = field(default_factory=dict)
    only: bool = False


NO_EDITS = PlaceEdits()


@dataclass(frozen=True)
class EditRules:
    """The controls of a request that edit logits, resolved to token ids. The defaults edit nothing.

    repetition_penalty: of every token in prompt and output, as in Hugging Face transformers (1909.05858).
    presence_penalty, frequency_penalty: subtracted once, and for each time, that the output has the token.
    no_repeat_ngram: n-grams of this size, over prompt and output, occur once; 0 is off.
    bias: added to logits; -inf bans a token, +inf bans all that have none.
    bad_words: token sequences that never become complete.
    min_new_tokens: no end token before so many; end_tokens are those.
    forced_end: the token at the place where the sequence must end; None forces nothing.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    min_new_tokens: int = 0
    end_tokens: frozenset[int] = frozenset()
    forced_end: int | None = None

    @property
    def empty(self) -> bool:
        """Whether no place is ever edited."""
        return self == EditRules(end_tokens=self.end_tokens)


class SequenceEdits:
    """The edits along one sequence; advances with every committed token."""

    def __init__(self, rules: EditRules, prompt: Sequence[int], *, length_limit: int) -> None:
        self._rules = rules
        self._prompt_tokens = len(prompt)
        self._length_limit = length_limit
        # How many committed tokens a ban can look back on.
        self._memory = max([1, rules.no_repeat_ngram, *(len(word) for word in rules.bad_words)]) - 1
        self._tokens: list[int] = []
        self._seen: set[int] = set()
        self._emitted: Counter[int] = Counter()
        self._following: dict[tuple[int, ...], set[int]] = {}
        for token in prompt:
            self._advance(token)

    def commit(self, token: int) -> None:
        """The sequence has emitted `token`."""
        self._emitted[token] += 1
        self._advance(token)

    def _advance(self, token: int) -> None:
        if self._rules.repetition_penalty != 1.0:
            self._seen.add(token)
        if (size := self._rules.no_repeat_ngram) > 0 and len(self._tokens) >= size - 1:
            self._following.setdefault(_last(self._tokens, size - 1), set()).add(token)
        self._tokens.append(token)

    def at(self, drafted: Sequence[int]) -> PlaceEdits:
        """The edits of the place behind the committed tokens and these drafted ones."""
        rules = self._rules
        edits = {token: Edit(bias=bias) for token, bias in rules.bias.items()}
        if rules.repetition_penalty != 1.0:
            for token in self._seen.union(drafted):
                edits[token] = edits.get(token, Edit())._replace(penalty=rules.repetition_penalty)
        if rules.presence_penalty or rules.frequency_penalty:
            counts = self._emitted + Counter(drafted)
            for token, count in counts.items():
                shift = rules.presence_penalty + rules.frequency_penalty * count
                edits[token] = edits.get(token, Edit())._replace(shift=shift)
        only = _resolve_infinite_bias(edits)
        for token in self._banned(drafted):
            edits[token] = Edit(shift=BANNED)
        return self._forced(len(self._tokens) + len(drafted)) or PlaceEdits(edits, only)

    def _banned(self, drafted: Sequence[int]) -> Iterable[int]:
        rules = self._rules
        if len(self._tokens) + len(drafted) - self._prompt_tokens < rules.min_new_tokens:
            yield from rules.end_tokens
        context = [*_last(self._tokens, min(self._memory, len(self._tokens))), *drafted]
        for word in rules.bad_words:
            if _ends_with(context, word[:-1]):
                yield word[-1]
        if rules.no_repeat_ngram > 0:
            yield from self._repeated(context, drafted)

    def _repeated(self, context: Sequence[int], drafted: Sequence[int]) -> Iterable[int]:
        """Tokens that would complete an n-gram a second time; the first may lie partly or wholly in the draft."""
        size = self._rules.no_repeat_ngram
        if len(self._tokens) + len(drafted) < size - 1:
            return
        ending = _last(context, size - 1)
        yield from self._following.get(ending, ())
        for end in range(max(size - 1, len(context) - len(drafted)), len(context)):
            if tuple(context[end - size + 1 : end]) == ending:
                yield context[end]

    def _forced(self, place: int) -> PlaceEdits | None:
        forced = self._rules.forced_end
        if forced is None or place != self._length_limit - 1:
            return None
        return PlaceEdits({forced: Edit()}, only=True)


def _resolve_infinite_bias(edits: dict[int, Edit]) -> bool:
    """Turn infinite biases into bans; True where some are +inf, so that only those tokens stay."""
    wanted = {token for token, edit in edits.items() if edit.bias == float("inf")}
    for token, edit in list(edits.items()):
        if token in wanted:
            edits[token] = edit._replace(bias=0.0)
        elif edit.bias == -float("inf") or wanted:
            edits[token] = Edit(shift=BANNED)
    return bool(wanted)


def _last(tokens: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(tokens[len(tokens) - count :])


def _ends_with(tokens: Sequence[int], ending: Sequence[int]) -> bool:
    return len(tokens) >= len(ending) and list(tokens[len(tokens) - len(ending) :]) == list(ending)
