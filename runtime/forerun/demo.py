"""`forerun demo`: plain and speculative decoding of the same prompts in turn, with the same tokens; only faster."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.options import directory_argument, json_option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from forerun.decoder import Decoder, Generation
    from forerun.row import Chunk

PROMPTS = (
    "Why does bread rise in the oven?",
    "Write a short note that asks my neighbour to turn the music down after ten at night.",
    "Write a Python function that counts how often each word occurs in a text.",
    "What should I pack for three days of hiking in the rain?",
    "Sum this up in one sentence: The library on Mill Street closes on Monday for six weeks. Its roof has leaked since "
    "the storms in spring, and the council has found the money for a new one. Books that are due in that time can be "
    "brought back to the town hall, where a small shelf of children's books will stand as well.",
)
"""What people ask for: to explain, to write, code, advice, a summary."""

WARM_UP = "Name three colours."


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded both ways, each as often as the other, in turn."""

    prompt: str
    plain: Sequence[Generation]
    speculative: Sequence[Generation]
    chunks: Sequence[Chunk]
    """What each round of the last speculative run emitted."""

    @property
    def identical(self) -> bool:
        """Whether every run gave the same tokens."""
        return len({generation.token_ids for generation in (*self.plain, *self.speculative)}) == 1

    @property
    def plain_tokens_per_s(self) -> float:
        """Tokens a second of plain decoding, prefill left out."""
        return _tokens_per_s(self.plain)

    @property
    def speculative_tokens_per_s(self) -> float:
        """Tokens a second of speculative decoding, prefill left out."""
        return _tokens_per_s(self.speculative)

    @property
    def speed_up(self) -> float:
        """How many times plain decoding's speed speculative decoding's is."""
        return self.speculative_tokens_per_s / self.plain_tokens_per_s

    def to_json(self) -> dict[str, Any]:
        """One of the `prompts` of `forerun demo --json`; the generations are the last of each kind."""
        return {
            "prompt": self.prompt,
            "identical": self.identical,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "speculative_tokens_per_s": self.speculative_tokens_per_s,
            "speed_up": self.speed_up,
            "plain": self.plain[-1].to_json(),
            "speculative": self.speculative[-1].to_json(),
        }


def compare(
    decoder: Decoder, prompts: Sequence[str], *, repeats: int, max_new_tokens: int, draft: str
) -> Iterator[Comparison]:
    """Decode each prompt plainly and with the draft, `repeats` times each and in turn, greedily."""
    for number, prompt in enumerate(prompts):
        plain: list[Generation] = []
        speculative: list[Generation] = []
        chunks: list[Chunk] = []
        for repeat in range(repeats):
            # Both go first in turn: a machine that slows down or speeds up favours neither.
            for is_plain in (True, False) if (number + repeat) % 2 == 0 else (False, True):
                name = "none" if is_plain else draft
                generation, shown = decode(decoder, prompt, max_new_tokens=max_new_tokens, draft=name)
                (plain if is_plain else speculative).append(generation)
                chunks = chunks if is_plain else shown
        yield Comparison(prompt, plain, speculative, chunks)


def decode(decoder: Decoder, prompt: str, **controls: Any) -> tuple[Generation, list[Chunk]]:
    """The generation of a prompt, and what each of its rounds emitted."""
    chunks: list[Chunk] = []
    stream = decoder.stream(prompt, **controls)
    while True:
        try:
            chunks.append(next(stream))
        except StopIteration as end:
            return end.value, chunks


def median(comparisons: Sequence[Comparison]) -> Comparison:
    """The one with the median speed-up; of an even number, the lower of the two in the middle."""
    ordered = sorted(comparisons, key=lambda comparison: comparison.speed_up)
    return ordered[(len(ordered) - 1) // 2]


def _tokens_per_s(generations: Sequence[Generation]) -> float:
    seconds = sum(generation.stats.decode_s for generation in generations)
    return sum(generation.stats.emitted for generation in generations) / seconds


@click.command()
@directory_argument
@click.argument("prompts", nargs=-1, metavar="[PROMPT]..")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of each answer.")
@click.option("--repeats", type=click.IntRange(min=1), default=2, show_default=True, help="Runs of each kind.")
@click.option(
    "--draft",
    type=click.Choice(["auto", "model", "ngram"]),
    default="auto",
    show_default=True,
    help="What proposes tokens in the speculative runs.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads. [default: the CPUs there are]")
@json_option
def demo(directory: Path, prompts: tuple[str, ...], threads: int | None, as_json: bool, **options: Any) -> None:
    """Show what DIR's engines are for: the tokens of plain decoding, sooner.

    Decodes each PROMPT (five everyday ones, if none is given) plainly and with the draft, in turn and greedily, and
    traces the one whose speed-up is the median.
    """
    from rich.console import Console

    from forerun.decoder import Decoder

    console, draft = Console(stderr=as_json, highlight=False), options["draft"]
    comparisons: list[Comparison] = []
    with Decoder(directory, threads=threads, load_draft=draft != "ngram") as decoder:
        _warm_up(console, decoder, draft)
        console.print(_HEADER, style="bold", soft_wrap=True)
        for comparison in compare(decoder, prompts or PROMPTS, **options):
            comparisons.append(comparison)
            console.print(_line(comparison), overflow="ellipsis", no_wrap=True)
        _trace(console, decoder, median(comparisons), several=len(comparisons) > 1)
    console.print(summary(comparisons), style="bold", soft_wrap=True)
    if as_json:
        click.echo(json.dumps(to_json(comparisons), ensure_ascii=False))
    if not all(comparison.identical for comparison in comparisons):
        sys.exit(1)


_HEADER = "plain  speculative     times  identical  prompt (speeds in tokens/s)"


def _warm_up(console: Console, decoder: Decoder, draft: str) -> None:
    with console.status("Warming up. The first time this measures what calls take on this machine."):
        for _ in compare(decoder, [WARM_UP], repeats=1, max_new_tokens=16, draft=draft):
            pass


def _line(comparison: Comparison) -> Text:
    from rich.text import Text

    line = Text(f"{comparison.plain_tokens_per_s:5.1f}  {comparison.speculative_tokens_per_s:11.1f}  ")
    line.append(f"{comparison.speed_up:8.2f}", "bold")
    line.append(f"  {_yes(comparison.identical):9}  ", "green" if comparison.identical else "bold red")
    return line.append(" ".join(comparison.prompt.split()))


def _trace(console: Console, decoder: Decoder, shown: Comparison, *, several: bool) -> None:
    from forerun.trace import Trace

    which = "The prompt with the median speed-up, round by round" if several else "Round by round"
    console.print(f"\n{which}: {shown.prompt}", style="bold", soft_wrap=True)
    trace = Trace(console, decoder.tokenizer)
    for chunk in shown.chunks:
        trace.round(chunk)
    trace.summary(shown.speculative[-1])
    console.print()


def summary(comparisons: Sequence[Comparison]) -> str:
    """What all prompts amount to, in one line."""
    shown, speed_ups = median(comparisons), [comparison.speed_up for comparison in comparisons]
    several = f"median of {len(comparisons)} prompts, {min(speed_ups):.2f} to {max(speed_ups):.2f}; "
    return (
        f"plain {shown.plain_tokens_per_s:.1f} tokens/s, speculative {shown.speculative_tokens_per_s:.1f}: "
        f"{shown.speed_up:.2f} times ({several if len(comparisons) > 1 else ''}"
        f"identical: {_yes(all(comparison.identical for comparison in comparisons))})"
    )


def to_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The object that `forerun demo --json` prints; `median` is the index of the prompt that was traced."""
    shown = median(comparisons)
    return {
        "identical": all(comparison.identical for comparison in comparisons),
        "median": comparisons.index(shown),
        "speed_up": shown.speed_up,
        "plain_tokens_per_s": shown.plain_tokens_per_s,
        "speculative_tokens_per_s": shown.speculative_tokens_per_s,
        "prompts": [comparison.to_json() for comparison in comparisons],
    }


def _yes(identical: bool) -> str:
    return "yes" if identical else "no"
