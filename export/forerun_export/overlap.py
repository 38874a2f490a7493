"""How much of prompts that figures are measured on stands in texts that a head was trained on.

    python -m forerun_export.overlap chat --training HEAD.work --training TEXTS

tells, for each set of prompts, the share of its n-grams of eight words that occur in the training's prompts, answers
and texts, and the prompt with the highest share. `--training` is the work folder of a `forerun train-head`, a prompt
file of bench, or plain text, as a file or a folder.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import tokenizers

from forerun.errors import ExportError, ForerunError
from forerun_export.bench.prompts import BenchPrompt, read_prompts
from forerun_export.heads.passages import read_texts

WORDS = 8
"""In an n-gram; a text of fewer words is one n-gram as a whole."""
_ANSWERS, _TOKENIZER = "answers.jsonl", Path("engine") / "tokenizer.json"


@dataclass(frozen=True)
class Overlap:
    """Of the `ngrams` of all prompts, counted as often as they stand there, `shared` occur in the training texts.

    `highest` is the largest share of a prompt, of `prompt` (its number from 0 on; None where none shares anything).
    `training_words` were looked through.
    """

    ngrams: int
    shared: int
    highest: float
    prompt: int | None
    training_words: int

    @property
    def share(self) -> float:
        """Of all n-grams of the prompts."""
        return self.shared / self.ngrams if self.ngrams else 0.0

    def __str__(self) -> str:
        worst = "" if self.prompt is None else f"; the prompt with most, number {self.prompt + 1}, {self.highest:.1%}"
        return (
            f"{self.share:.2%} of the {self.ngrams:,} n-grams of {WORDS} words stand in the training texts "
            f"({self.training_words:,} words){worst}"
        )


def overlap(prompts: Sequence[Sequence[str]], training: Iterable[str]) -> Overlap:
    """Compare prompts, each of one text or several, with training texts, which are looked through once.

    Words are letters, digits and underscores without regard to case; what stands between them does not count. No
    n-gram goes from one text into the next.
    """
    counted = [[gram for text in texts for gram in _ngrams(_words(text))] for texts in prompts]
    wanted = {gram for grams in counted for gram in grams}
    lengths = sorted({len(gram) for gram in wanted})
    found: set[tuple[str, ...]] = set()
    training_words = 0
    for text in training:
        words = _words(text)
        training_words += len(words)
        for length in lengths:
            found |= wanted.intersection(_windows(words, length))
    shares = [sum(gram in found for gram in grams) / len(grams) if grams else 0.0 for grams in counted]
    highest = max(shares, default=0.0)
    return Overlap(
        ngrams=sum(map(len, counted)),
        shared=sum(gram in found for grams in counted for gram in grams),
        highest=highest,
        prompt=shares.index(highest) if highest > 0 else None,
        training_words=training_words,
    )


def of_prompts(prompts: Sequence[BenchPrompt], training: Iterable[str]) -> Overlap:
    """The same of prompts as bench reads them, with all turns of a conversation and what is begun of the answer."""
    return overlap([_texts(prompt) for prompt in prompts], training)


def training_texts(place: str) -> Iterator[str]:
    """The texts of a work folder's answers with their prompts, of a prompt file, or of plain text.

    Raises ExportError or RequestError for a place that holds none.
    """
    path = Path(place)
    if (path / _ANSWERS).is_file():
        yield from _answered(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")) or not path.exists():
        for prompt in read_prompts([place]):
            yield from _texts(prompt)
    else:
        yield from read_texts([place])


def _answered(work: Path) -> Iterator[str]:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(work / _TOKENIZER))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ExportError(
            f"{work / _TOKENIZER} cannot be read ({error}); give the work folder of a training"
        ) from error
    lines = (work / _ANSWERS).read_bytes().split(b"\n")[:-1]  # the last may still be written by a training that runs
    try:
        latest = {entry["number"]: entry for entry in map(json.loads, lines)}
        for entry in latest.values():
            yield str(tokenizer.decode([*entry["prompt"], *entry["answer"]], skip_special_tokens=True))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ExportError(
            f"{work / _ANSWERS} holds no answers ({error!r}); give the work folder of a training"
        ) from error


def _texts(prompt: BenchPrompt) -> list[str]:
    return [text for text in (*(text for _, text in prompt.turns), prompt.begun) if text]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _ngrams(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return _windows(words, min(WORDS, len(words)))


def _windows(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(length)), strict=False)


def _one_line(command: Any) -> Any:
    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except ForerunError as error:
            raise click.ClickException(str(error)) from error

    return run


@click.command()
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPTS..")
@click.option("--training", multiple=True, required=True, metavar="PATH", help="A work folder, prompts or texts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for all.")
@_one_line
def main(prompts: Sequence[str], training: Sequence[str], as_json: bool) -> None:
    """Tell how much of each of PROMPTS stands in what a head was trained on."""
    texts = [text for place in training for text in training_texts(place)]
    found = {name: of_prompts(read_prompts([name]), texts) for name in prompts}
    if as_json:
        click.echo(json.dumps({name: {**asdict(one), "share": one.share} for name, one in found.items()}))
        return
    for name, one in found.items():
        click.echo(f"{name}: {one}")


if __name__ == "__main__":
    main()
