"""Options of commands: those of `forerun generate` that are controls of a request have the names of `Controls`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

_Option = Callable[[Any], Any]

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")
directory_argument = click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")


def control_options(command: Any) -> Any:
    """Decorates a command with an option for every control; values are checked by `Controls`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def draft_length(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    """The callback of an option that is `auto` (None) or a draft length."""
    if value == "auto":
        return None
    if value.isascii() and value.isdigit():
        return int(value)
    raise click.BadParameter(f"{value!r} is neither 'auto' nor a whole number of at least 0")


def _logit_bias(context: click.Context, parameter: click.Parameter, value: Sequence[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for entry in value:
        token, _, amount = entry.partition("=")
        try:
            bias[int(token)] = float(amount)
        except ValueError:
            raise click.BadParameter(f"{entry!r} is not TOKEN=BIAS, as in 42=-1.5 or 42=-inf") from None
    return bias


def _template_arguments(context: click.Context, parameter: click.Parameter, value: Sequence[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for entry in value:
        name, equals, text = entry.partition("=")
        if not equals:
            raise click.BadParameter(f"{entry!r} is not NAME=JSON, as in enable_thinking=false")
        if name in arguments:
            raise click.BadParameter(f"{name} is given twice")
        try:
            arguments[name] = json.loads(text)
        except ValueError as error:
            raise click.BadParameter(
                f"{entry!r}: {text!r} is no JSON ({error}); write true, 3, '\"a text\"', '[..]' or '{{..}}'"
            ) from None
    return arguments


def _number(name: str, default: float, text: str) -> _Option:
    return click.option(name, type=float, default=default, show_default=True, help=text)


def _count(name: str, default: int | None, text: str) -> _Option:
    return click.option(name, type=int, default=default, show_default=default is not None, help=text)


def _several(name: str, field: str, metavar: str, text: str, **more: Any) -> _Option:
    return click.option(name, field, multiple=True, metavar=metavar, help=f"{text} May be given several times.", **more)


_OPTIONS: Sequence[_Option] = (
    _count("--max-new-tokens", 256, "Tokens to emit at the most."),
    _number("--temperature", 0.0, "0 takes the most likely token."),
    _count("--top-k", 0, "Only the K most likely tokens; 0 is off."),
    _number("--top-p", 1.0, "Only the most likely tokens that reach this probability together; 1 is off."),
    _number("--min-p", 0.0, "Only tokens at least this likely, relative to the most likely one; 0 is off."),
    _number("--repetition-penalty", 1.0, "Above 1, tokens of prompt and output become less likely."),
    _number("--presence-penalty", 0.0, "Subtracted from the logits of tokens that the output has."),
    _number("--frequency-penalty", 0.0, "Subtracted for each time that the output has the token."),
    _count("--no-repeat-ngram", 0, "No N tokens in a row occur twice; 0 is off."),
    _several(
        "--logit-bias", "logit_bias", "TOKEN=BIAS", "Added to a token's logit, or -inf, inf.", callback=_logit_bias
    ),
    _several("--bad-word", "bad_words", "TEXT", "Text whose tokens never come in a row."),
    _count("--min-new-tokens", 0, "No end token comes before so many."),
    click.option("--force-end", is_flag=True, help="Make the last token that the limit allows an end token."),
    _several("--stop", "stop", "TEXT", "Text that ends the output."),
    _several("--stop-token", "stop_tokens", "TOKEN", "Token id that ends the output.", type=int),
    _count("--seed", None, "Makes a sampled text repeatable. Without it, a fresh one is taken and told."),
    click.option(
        "--law",
        type=click.Choice(["auto", "residual", "block", "coupled", "greedy"]),
        default="auto",
        show_default=True,
        help="Rule of acceptance; auto is greedy at temperature 0, coupled with a seed, else block.",
    ),
    click.option(
        "--draft",
        type=click.Choice(["auto", "model", "ngram", "none"]),
        default="auto",
        show_default=True,
        help="What proposes tokens: the directory's draft, the text itself, nothing, or whichever pays.",
    ),
    click.option(
        "--draft-length",
        callback=draft_length,
        default="auto",
        show_default=True,
        metavar="auto|N",
        help="Tokens proposed in a round; auto chooses them round by round.",
    ),
    _count("--logprobs", None, "With --json: log-probabilities, and those of the N most likely tokens."),
    _count("--n", 1, "Samples of the prompt, each with a seed of its own."),
    _several(
        "--template-arg",
        "template_arguments",
        "NAME=JSON",
        "What the chat template is given, as in enable_thinking=false.",
        callback=_template_arguments,
    ),
    click.option(
        "--parse-special", is_flag=True, help="Special tokens spelled out in the prompt are tokens, not text."
    ),
)
