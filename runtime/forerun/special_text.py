"""Special tokens that a user's text spells out: text, where those that a chat template writes are tokens.

A template renders to one string, in which the two look alike. So where a special token begins in a user's text, its
first character is replaced by a *mark*: a character that the conversation has nowhere else. What the template does to
the text meanwhile (trim, slice, count, dump as JSON) sees a text of the same length. Marked, it is no special token to
the tokenizer, which turns marks back before it looks for words.

A text that ends in the beginning of a special token is marked there too: the next text might begin with the rest. What
a template puts together itself, such as '<|' + role + '|>', is a token as ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import tokenizers

from forerun.errors import RequestError

MARKS = range(0x12000, 0x1239A)
"""Code points that may be marks: cuneiform signs, which Python's repr leaves as they are (it escapes private ones)."""


class SpecialText:
    """The special tokens of a tokenizer, as texts."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = [entry for entry in tokenizer.get_added_tokens_decoder().values() if entry.special and entry.content]
        self._tokens = sorted({entry.content for entry in added})
        self._longest = max(map(len, self._tokens), default=0)
        self._begin = re.compile(f"(?={'|'.join(map(re.escape, self._tokens))})")  # inside of another too
        self._normalizer = tokenizer.normalizer if any(entry.normalized for entry in added) else None
        self.marked_tokenizer = lru_cache(maxsize=4)(self._make_marked_tokenizer)

    def any_in(self, texts: Iterable[str]) -> bool:
        """Whether some text has a special token, or ends in the beginning of one."""
        return bool(self._tokens) and any(map(self._is_in, texts))

    def _is_in(self, text: str) -> bool:
        if self._normalizer is not None and self._begin.search(self._normalizer.normalize_str(text)):
            return True
        return self._begin.search(text) is not None or next(self._unfinished(text), None) is not None

    def begins(self, text: str) -> set[int]:
        """The places in a text where a special token begins, whole or cut off by the end of the text."""
        return {found.start() for found in self._begin.finditer(text)}.union(self._unfinished(text))

    def _unfinished(self, text: str) -> Iterator[int]:
        for end in {len(text), len(text.rstrip())}:  # templates trim
            for start in range(max(0, end - self._longest + 1), end):
                tail = text[start:end]
                # A word is none, or the names of roles, which templates compare, would be in danger.
                if not tail.isalnum() and any(token.startswith(tail) for token in self._tokens):
                    yield start

    def marks(self, taken: Iterable[str]) -> Marks:
        """Marks that are in none of the texts `taken`."""
        used = set().union(*taken)
        free = (chr(code) for code in MARKS if chr(code) not in used)
        first_characters = sorted({token[0] for token in self._tokens})
        return Marks(self, dict(zip(first_characters, free, strict=False)))

    @cached_property
    def controls(self) -> frozenset[int]:
        """Ids of special tokens, but for the one that stands for what the vocabulary does not know."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        unknown = getattr(self.tokenizer.model, "unk_token", None)
        return frozenset(token for token, entry in added if entry.special and entry.content != unknown)

    def _make_marked_tokenizer(self, mark_of: tuple[tuple[str, str], ...]) -> tokenizers.Tokenizer:
        """The tokenizer with a normalizer that turns marks back, behind the place where special tokens are found."""
        data = json.loads(self.tokenizer.to_str())
        turn_back = [
            {"type": "Replace", "pattern": {"String": mark}, "content": character} for character, mark in mark_of
        ]
        own = [] if data["normalizer"] is None else [data["normalizer"]]
        data["normalizer"] = {"type": "Sequence", "normalizers": [*turn_back, *own]}
        for entry in data["added_tokens"]:
            entry["normalized"] = entry["normalized"] and not entry["special"]
        return tokenizers.Tokenizer.from_str(json.dumps(data))


@dataclass(frozen=True)
class Marks:
    """What stands in user's texts for the first characters of special tokens, for one conversation."""

    special: SpecialText
    of: Mapping[str, str]
    """The mark of each first character."""

    def set_in(self, text: str) -> str:
        """The text with its marks."""
        characters = list(text)
        for place in self.special.begins(text):
            characters[place] = self.of[text[place]]
        return "".join(characters)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text with marks: what is marked becomes no special token, and decodes to what was given.

        Raises RequestError where the vocabulary can spell a marked text in no other way.
        """
        tokenizer, controls = self.special.marked_tokenizer(tuple(self.of.items())), self.special.controls
        encoding = tokenizer.encode(text, add_special_tokens=False)
        tokens: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # A few vocabularies (of whole words, mostly) have special tokens among their words.
            is_word = token in controls and any(mark in text[start:end] for mark in self.of.values())
            tokens += self._spelled(text[start:end]) if is_word else [token]
        return tokens

    def _spelled(self, text: str) -> list[int]:
        back = {ord(mark): character for character, mark in self.of.items()}
        characters = text.translate(back)
        encode = self.special.tokenizer.encode
        tokens = [token for character in characters for token in encode(character, add_special_tokens=False).ids]
        if not self.special.controls.isdisjoint(tokens):
            raise RequestError(
                f"this vocabulary has {characters!r} as a special token only, and can spell it in no other way; "
                "leave it out, or let it be that token with --parse-special (parse_special=True)"
            )
        return tokens
