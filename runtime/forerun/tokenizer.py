"""Text to tokens and back: the tokenizer and the chat template of one engine directory."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from forerun.chat import ChatTemplate, Message, render_chat
from forerun.contents import replaced, texts_in
from forerun.errors import EngineError, RequestError
from forerun.special_text import SpecialText
from forerun.values import check_text

__all__ = ["Message", "Tokenizer", "render_chat", "vocabulary_sha256"]


def vocabulary_sha256(tokenizer: tokenizers.Tokenizer) -> str:
    """Hex SHA-256 over every (id, token text), added tokens included, in the order of the ids.

    Two tokenizers with the same hash give every id the same text, so the models behind them may be paired.
    """
    digest = hashlib.sha256()
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    for token, text in sorted((token, text) for text, token in vocabulary.items()):
        data = text.encode()
        digest.update(b"%d %d " % (token, len(data)) + data)  # lengths keep neighbours from running together
    return digest.hexdigest()


class Tokenizer:
    """A `tokenizers.Tokenizer` with the end tokens and the chat template that belong to it.

    `bos_token` and `eos_token` are what the template may print under those names; None leaves them undefined.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        end_tokens: Sequence[int],
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        # A tokenizer.json made for training may carry both; neither may touch a prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = (
            None if chat_template is None else ChatTemplate(chat_template, bos_token=bos_token, eos_token=eos_token)
        )
        self._eos_token = eos_token
        self.end_tokens = frozenset(end_tokens)
        """Tokens that end a sequence."""

    @classmethod
    def open(cls, folder: Path, *, end_tokens: Sequence[int], bos_token: str | None, eos_token: str | None) -> Self:
        """Read `tokenizer.json` and, if there, `chat_template.jinja` from an engine directory.

        Raises EngineError, naming the file, if one is missing or damaged.
        """
        template = folder / "chat_template.jinja"
        return cls(
            _read_tokenizer(folder / "tokenizer.json"),
            end_tokens=end_tokens,
            chat_template=_read_text(template) if template.exists() else None,
            bos_token=bos_token,
            eos_token=eos_token,
        )

    @cached_property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used."""
        return self._template is not None

    @cached_property
    def end_token(self) -> int | None:
        """The token that a model writes to end: that of `eos_token`, else the first end token; None without any."""
        named = self._tokenizer.token_to_id(self._eos_token) if self._eos_token is not None else None
        return named if named is not None else min(self.end_tokens, default=None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of raw text, with the special tokens that the model expects around it (often none).

        A special token that the text spells out is that token. Raises RequestError for half a surrogate pair.
        """
        check_text("the prompt", text)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        template_arguments: Mapping[str, object] | None = None,
        parse_special: bool = False,
    ) -> list[int]:
        """Tokens of a conversation in the model's own format, up to where the model's answer begins.

        `template_arguments` are what else the template is given: see `ChatTemplate.render`. A special token that
        messages or arguments spell out is text, those that the template writes are tokens; with `parse_special`
        both are tokens.
        Raises RequestError if there is no chat template, if a text is no Unicode, or if the template refuses the
        messages.
        """
        if self._template is None:
            raise RequestError("this engine has no chat template; pass the prompt with --raw (raw=True)")
        contents = (messages, dict(template_arguments or {}))
        texts = [check_text(where, text) for where, text in _named_texts(*contents)]
        if parse_special or not self._special_text.any_in(texts):
            return self.encode(self._template.render(*contents), add_special_tokens=False)  # it writes its own
        marks = self._special_text.marks(taken=[*texts, self._template.source])
        marked = [replaced(content, marks.set_in) for content in contents]
        return marks.encode(self._template.render(*marked))

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of all tokens at once; bytes that are no UTF-8 come out as U+FFFD."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    def vocabulary_sha256(self) -> str:
        """Hex SHA-256 of the whole token map: see the function of the same name."""
        return vocabulary_sha256(self._tokenizer)

    def visible_text(self, token: int) -> str | None:
        """Text of a token as the vocabulary spells it; None if `decode` skips it (special, or no such id)."""
        return None if token in self._special_tokens else self._tokenizer.id_to_token(token)

    @cached_property
    def decoder(self) -> dict[str, Any] | None:
        """How token texts become text: the decoder's part of tokenizer.json (None: joined with spaces)."""
        decoder = self._tokenizer.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    @cached_property
    def _special_tokens(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @cached_property
    def _special_text(self) -> SpecialText:
        return SpecialText(self._tokenizer)


def _named_texts(messages: Sequence[Message], arguments: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Every text that goes into a template, with where it stands in what the user gave."""
    yield from texts_in(messages, "messages")
    yield from texts_in(arguments, "template_arguments")


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise EngineError(f"{path} is missing; export the engine again")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise EngineError(f"{path} is damaged ({error}); export the engine again") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # bytes, because text mode would rewrite \r\n
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} is damaged ({error}); export the engine again") from error
