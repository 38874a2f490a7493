"""Chat templates: conversations to text, as Hugging Face's templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from forerun.contents import replaced, texts_in
from forerun.errors import EngineError, RequestError
from forerun.special_text import MARKS
from forerun.values import check_flag

if TYPE_CHECKING:
    from jinja2 import Environment, Template

Message = Mapping[str, object]
"""One turn of a conversation, usually `{"role": ..., "content": ...}`."""

OWN_NAMES = ("messages", "bos_token", "eos_token", "raise_exception", "strftime_now")
"""What no template argument may be called: the conversation, and what comes with the model or the environment."""


class ChatTemplate:
    """A Jinja chat template with the special tokens that it may print; None leaves these undefined."""

    def __init__(self, source: str, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        self.source = source
        # A bos_token of None would print "None"; templates test `tools is none`.
        specials = {"bos_token": bos_token, "eos_token": eos_token}
        self._names: dict[str, Any] = {name: text for name, text in specials.items() if text is not None}
        self._names |= {"tools": None, "documents": None}

    def render(self, messages: Sequence[Message], arguments: Mapping[str, object] | None = None) -> str:
        """Text of a conversation.

        `arguments` are what the template knows by these names (`tools`, `enable_thinking`, ..; others do nothing), and
        two that every template has: `add_generation_prompt` (True unless given or the next is: the text ends where the
        answer begins) and `continue_final_message` (the text ends with the last message's, which is to be continued).

        Raises EngineError if the template is no Jinja, RequestError with the template's message if it fails.
        """
        given = dict(arguments or {})
        continued = check_flag("continue_final_message", given.pop("continue_final_message", False))
        begin = check_flag("add_generation_prompt", given.pop("add_generation_prompt", not continued))
        if not continued:
            return self._render(messages, given, begin)
        if begin:
            raise RequestError(
                "continue_final_message goes on with the last message, add_generation_prompt begins another; give one"
            )
        return self._render_to_the_end_of_the_last(messages, given)

    def _render(self, messages: Sequence[Message], arguments: Mapping[str, object], begin: bool) -> str:
        names = {**self._names, "messages": messages, "add_generation_prompt": begin, **arguments}
        compiled = self._compiled
        try:
            return compiled.render(names)
        except Exception as error:  # a template is a program: it may fail with any Python error
            reason = " ".join(str(error).split())
            raise RequestError(
                f"the chat template refuses these messages: {reason}; change them, or use --raw (raw=True)"
            ) from error

    @cached_property
    def _compiled(self) -> Template:
        from jinja2 import TemplateSyntaxError

        try:
            return _chat_environment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise EngineError(
                f"chat_template.jinja cannot be read (line {error.lineno}: {error.message}); "
                "export the engine again, or pass the prompt with --raw (raw=True)"
            ) from error

    def _render_to_the_end_of_the_last(self, messages: Sequence[Message], arguments: Mapping[str, object]) -> str:
        """As transformers' continue_final_message, by a character that stands at the end of the last text.

        Spaces behind it are kept if the template keeps them.
        """
        end = _character_in_none_of(self.source, messages, arguments)
        ended, spaces = _with_end(messages, end)
        before, found, behind = self._render(ended, arguments, begin=False).rpartition(end)
        if not found:
            raise RequestError(
                "continue_final_message: the chat template does not print the last message's content as it is; "
                "leave the argument out"
            )
        return before.replace(end, "") + (spaces if behind.startswith(spaces) else "")


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> str:
    """Text of a conversation after a Jinja chat template: see `ChatTemplate`."""
    made = ChatTemplate(template, bos_token=bos_token, eos_token=eos_token)
    return made.render(messages, {"add_generation_prompt": add_generation_prompt})


def check_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    """A copy of template arguments. Raises RequestError for a name that is none, or that is not theirs to give."""
    if not isinstance(arguments, Mapping):
        raise RequestError(f"template_arguments is {arguments!r}; give a mapping from names to values")
    for name in arguments:
        if not (isinstance(name, str) and name.isidentifier()):
            raise RequestError(f"template_arguments: {name!r} is no name that a template could use")
        if name in OWN_NAMES:
            raise RequestError(f"template_arguments: {name} is not an argument: it comes with the prompt or the model")
    copied: dict[str, object] = replaced(arguments)
    return copied


def _with_end(messages: Sequence[Message], end: str) -> tuple[list[Message], str]:
    """The messages with `end` behind the last one's text, and the white space that follows it there."""
    last: dict[str, Any] = dict(messages[-1]) if messages else {}
    content = last.get("content")
    several = list(content) if isinstance(content, (list, tuple)) else None
    parts: list[dict[str, Any]] = [{"text": content}] if several is None else [dict(part) for part in several]
    with_text = [part for part in parts if isinstance(part.get("text"), str)]
    if not with_text:
        raise RequestError("continue_final_message: the last message has no text to continue; give it a content")
    text: str = with_text[-1]["text"]
    stripped = text.rstrip()
    spaces = text[len(stripped) :]
    with_text[-1]["text"] = stripped + end + spaces
    last["content"] = parts[0]["text"] if several is None else parts
    return [*messages[:-1], last], spaces


def _character_in_none_of(*contents: object) -> str:
    """A character for internal use (Unicode's noncharacters, then the private ones) that no text has."""
    used = {character for _, text in texts_in(contents, "") for character in text}
    return next(chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE)) if chr(code) not in used)


@lru_cache(maxsize=1)
def _chat_environment() -> Environment:
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
    # The one thing here that reads the clock: a template that prints the date gives another prompt on another day.
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


_ESCAPED = re.compile(f"[^\x00-\x7f{chr(MARKS[0])}-{chr(MARKS[-1])}]")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which changes the prompt.
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    # Marks stand for ASCII characters (special_text.py), which are no others when escaped.
    return _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text
