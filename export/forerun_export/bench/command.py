"""`forerun bench`: from its options to what it prints and writes."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from forerun.controls import make_controls
from forerun.errors import RequestError
from forerun_export.bench import BASELINES, Choice, Settings, bench, check_outputs, default_threads
from forerun_export.bench.prompts import read_prompts
from forerun_export.bench.tables import as_text
from forerun_export.progress import console_progress


def run(
    directory: Path,
    *,
    prompts: Sequence[str],
    limit: int | None,
    baseline: str | None,
    checkpoint: str | None,
    draft_checkpoint: str | None,
    max_new_tokens: int,
    temperature: float,
    law: str,
    draft_length: int | None,
    sweep: str | None,
    repeats: int,
    seed: int,
    threads: int | None,
    prefill: int,
    json_path: Path | None,
    plot: Path | None,
) -> bool:
    """Measure, print, write; False where nothing could be measured or speculation changed a token."""
    choice = Choice(
        baselines=BASELINES if baseline is None else _names(baseline),
        draft_length=draft_length,
        sweep=_lengths(sweep),
        checkpoint=checkpoint,
        draft_checkpoint=draft_checkpoint,
    )
    settings = Settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        law=law,
        seed=seed,
        repeats=repeats,
        threads=threads or default_threads(),
        prefill_tokens=prefill,
    )
    make_controls({"max_new_tokens": max_new_tokens, "temperature": temperature, "law": law, "seed": seed})  # checks
    check_outputs(json_path, plot)
    with console_progress() as progress:
        asked = read_prompts(prompts or ["default"], limit=limit, report=progress)
        found = bench(directory, asked, settings=settings, choice=choice, report=progress)
    line = json.dumps(found.to_json(), ensure_ascii=False, allow_nan=False)
    if json_path is not None:
        json_path.write_text(line + "\n", encoding="utf-8")
    if plot is not None:
        from forerun_export.bench.plot import save_plot

        save_plot(found, plot)
    click.echo(f"{as_text(found)}\n{line}")
    return found.lossless and bool(found.measured.runs)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [] if names == ["none"] else names


def _lengths(text: str | None) -> list[int]:
    try:
        return [int(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise RequestError(f"sweep {text!r} is no list of draft lengths; write it as in 0,1,2,4") from None
