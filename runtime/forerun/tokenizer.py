"""Text to tokens and back: the tokenizer and the chat template of one engine directory."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import tokenizers

from forerun.errors import EngineError, RequestError

if TYPE_CHECKING:
    from jinja2 import Environment

Message = Mapping[str, object]
"""One turn of a conversation, usually `{"role": ..., "content": ...}`."""


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
        self._chat_template = chat_template
        self._bos_token = bos_token
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
        return self._chat_template is not None

    @cached_property
    def end_token(self) -> int | None:
        """The token that a model writes to end: that of `eos_token`, else the first end token; None without any."""
        named = self._tokenizer.token_to_id(self._eos_token) if self._eos_token is not None else None
        return named if named is not None else min(self.end_tokens, default=None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of raw text, with the special tokens that the model expects around it (often none)."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation in the model's own format, up to where the model's answer begins.

        Raises RequestError if there is no chat template, or if the template refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError("this engine has no chat template; pass the prompt with --raw (raw=True)")
        text = render_chat(self._chat_template, messages, bos_token=self._bos_token, eos_token=self._eos_token)
        return self._encode(text, add_special_tokens=False)  # the template writes its own

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

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is no valid Unicode text at character {error.start}; pass it as UTF-8"
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> str:
    """Text of a conversation after a Jinja chat template, in the environment that Hugging Face's expect.

    `strftime_now` is the one thing here that reads the clock: a template that prints the date gives another
    prompt on another day.
    Raises EngineError if the template is no Jinja, RequestError with the template's message if it fails.
    """
    from jinja2 import TemplateSyntaxError

    # A bos_token of None would print "None", so it stays undefined; templates test `tools is none`.
    specials = {"bos_token": bos_token, "eos_token": eos_token}
    names: dict[str, Any] = {name: text for name, text in specials.items() if text is not None}
    names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
    names |= {"tools": None, "documents": None}
    try:
        compiled = _chat_environment().from_string(template)
    except TemplateSyntaxError as error:
        raise EngineError(
            f"chat_template.jinja cannot be read (line {error.lineno}: {error.message}); "
            "export the engine again, or pass the prompt with --raw (raw=True)"
        ) from error
    try:
        return compiled.render(names)
    except Exception as error:  # a template is a program: it may fail with any Python error
        reason = " ".join(str(error).split())
        raise RequestError(
            f"the chat template refuses these messages: {reason}; change them, or use --raw (raw=True)"
        ) from error


@lru_cache(maxsize=1)
def _chat_environment() -> "Environment":
    # jinja2 costs more start-up time than the rest of this module: raw prompts never need it.
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here its body is printed as it is."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which changes the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
