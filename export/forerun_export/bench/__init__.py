"""`forerun bench`: forerun against what people would run the same checkpoint with otherwise, on their prompts.

prompts       files of several kinds, in categories that are reported apart
engines       what is compared, and which worker process runs it
worker        one system in a process of its own (systems, torch_system, optimum_system, genai_system), spoken to by
              processes; cached, genai_build make what they run
measuring     the runs, interleaved prompt by prompt
summaries, lossless, time_split, prediction, report    what came of them; tables and plot show it
"""

import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forerun.directory import EngineDirectory
from forerun.errors import ExportError, RequestError
from forerun.manifest import Manifest
from forerun.tokenizer import Tokenizer
from forerun_export.bench.engines import BASELINES, Choice, line_up
from forerun_export.bench.machine import machine, versions
from forerun_export.bench.measuring import Settings, TokenPrompt, measure
from forerun_export.bench.memory import available_bytes
from forerun_export.bench.prompts import BenchPrompt
from forerun_export.bench.report import BenchReport
from forerun_export.progress import Report, silent

__all__ = ["BASELINES", "BenchReport", "Choice", "Settings", "bench", "check_outputs", "default_threads"]

PLOT_SUFFIXES = (".png", ".svg", ".html")
QUIET = 0.03  # the share of the processors that an idle system takes at the most
SPARE_MEMORY = 0.9  # the share of what is free that workers may plan with


def bench(
    path: Path,
    prompts: Sequence[BenchPrompt],
    *,
    settings: Settings,
    choice: Choice,
    report: Report = silent,
) -> BenchReport:
    """Measure an engine directory on these prompts.

    Raises RequestError for what means nothing, and EngineError for a directory that cannot be used. An engine that
    cannot be had, or that fails on the way, is no error: the report says why.
    """
    started = time.perf_counter()
    directory = EngineDirectory.open(path)
    free = available_bytes()
    free = None if free is None else int(free * SPARE_MEMORY)
    line = line_up(directory, choice, threads=settings.threads, available_bytes=free)
    tokens, notes = _token_prompts(directory, prompts, settings)
    if settings.prefill_tokens >= directory.manifest.limits.context:
        context = directory.manifest.limits.context
        notes.append(f"no prompt of {settings.prefill_tokens} tokens was read: the context is {context}")
        settings = replace(settings, prefill_tokens=0)
    measured = measure(line, tokens, settings, available_bytes=free, report=report)
    if measured.groups > 1:
        notes.append(
            f"the engines did not fit into memory together and ran in {measured.groups} groups, one after the other: "
            "between groups the machine may have changed"
        )
    disturbed = max((share for share in measured.others_shares if share is not None), default=0.0)
    if disturbed > QUIET:
        notes.append(
            f"other processes took {disturbed:.0%} of the processors during the runs: trust ratios, and repeat it alone"
        )
    return BenchReport(
        directory=str(path),
        machine=machine(),
        versions=versions(),
        settings=settings,
        engines=line.engines,
        measured=measured,
        prompts=len(tokens),
        notes=[*notes, *line.notes],
        seconds=time.perf_counter() - started,
    )


def _token_prompts(
    directory: EngineDirectory, prompts: Sequence[BenchPrompt], settings: Settings
) -> tuple[list[TokenPrompt], list[str]]:
    """The prompts as token ids, those that leave no room for the new tokens left out; and a note about these."""
    manifest: Manifest = directory.manifest
    tokenizer = Tokenizer.open(
        directory.path,
        end_tokens=manifest.tokenizer.end_tokens,
        bos_token=manifest.tokenizer.bos_token,
        eos_token=manifest.tokenizer.eos_token,
    )
    found = [TokenPrompt(prompt.category, prompt.tokens(tokenizer)) for prompt in prompts]
    room = manifest.limits.context - settings.max_new_tokens
    kept = [prompt for prompt in found if 0 < len(prompt.tokens) <= room]
    if not kept:
        raise RequestError(
            f"no prompt leaves room for {settings.max_new_tokens} new tokens in a context of "
            f"{manifest.limits.context}; give shorter ones, or lower --max-new-tokens"
        )
    left_out = len(found) - len(kept)
    note = f"{left_out} of {len(found)} prompts left out: they leave no room in a context of {manifest.limits.context}"
    return kept, [note] if left_out else []


def check_outputs(json_path: Path | None, plot: Path | None) -> None:
    """Find out before the runs what would fail behind them. Raises RequestError or ExportError."""
    for path in (json_path, plot):
        if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
            raise RequestError(f"cannot write {path}; give a file in a folder that is there and may be written to")
    if plot is None:
        return
    if plot.suffix not in PLOT_SUFFIXES:
        raise RequestError(f"{plot} is no picture that can be made; known endings: {', '.join(PLOT_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ExportError("a plot needs the package matplotlib; install it with: pip install 'forerun[bench]'")


def default_threads() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
