"""From a checkpoint to a trained draft head: prompts, answers, hidden states, laws, training, report."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forerun.decoder import Decoder
from forerun.errors import ExportError
from forerun.tokenizer import Tokenizer
from forerun_export.bench.prompts import BenchPrompt, read_prompts
from forerun_export.build import export
from forerun_export.head_files import TrainedHead
from forerun_export.heads.acceptance import HeadDrafting, measure
from forerun_export.heads.answers import Answer, answer, ask
from forerun_export.heads.beginning import begin, go_on
from forerun_export.heads.card import Data, card
from forerun_export.heads.features import Example, cache_features
from forerun_export.heads.folder import (
    SCHEMA_VERSION,
    TOKENS,
    HeadFigures,
    HeadRecord,
    HeadTarget,
    HeadTraining,
    write_head,
)
from forerun_export.heads.lessons import lessons
from forerun_export.heads.module import DraftHead
from forerun_export.heads.other_drafts import LayersOutDrafting, NgramDrafting
from forerun_export.heads.passages import SHORTEST, passages, read_texts
from forerun_export.heads.prompts import CHAT, CODE, code_prompts, interleaved
from forerun_export.heads.teacher import Teacher
from forerun_export.heads.training import Schedule, Trained, Trainer, Watch
from forerun_export.heads.vocabulary import candidates, coverage, expected_counts
from forerun_export.heads.work_folder import claim
from forerun_export.overlap import of_prompts
from forerun_export.progress import Report
from forerun_export.recipe import read_recipe
from forerun_export.sources import Source, resolve
from forerun_export.writer import disk_errors

REPORTED_STEPS = 5
MEASUREMENTS = 12
WATCHED = 3  # of so many held-out answers one is watched, in a training that goes on from another


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `forerun train-head` is asked for; see its help. `held_out` are files; `command` is told by the card."""

    target: str
    out: Path
    work: Path
    prompts: Sequence[str] = ()
    self_prompts: int = 0
    code_prompts: int = 0
    text: Sequence[str] = ()
    start: Path | None = None
    passages: int = 1000
    held_out: Sequence[str] = ()
    max_new_tokens: int = 160
    context: int = 1024
    answer_precision: str = "fp32"
    answer_batch: int = 64
    vocabulary: int = 16384
    epochs: int = 4
    batch: int = Schedule.batch
    unrolled: int = Schedule.unrolled
    learning_rate: float = Schedule.learning_rate
    seed: int = 0
    device: str = "auto"
    command: str = ""


@dataclass(frozen=True)
class Result:
    """A head written at `path`, and the held-out figures of it and of other drafts, by kind of prompt."""

    path: Path
    drafts: Mapping[str, Mapping[str, HeadFigures]]
    trained: Trained
    data: Data


def train_head(options: Options, *, report: Report, watch: Watch) -> Result:
    """Do all of it; what a run that was stopped left in `options.work` is not done again.

    Raises ExportError or RequestError for what cannot be trained.
    """
    with disk_errors(options.work, other_place="use another --work"):
        return _train_head(options, report, watch)


def _train_head(options: Options, report: Report, watch: Watch) -> Result:
    device, source = _device(options.device), resolve(options.target)
    _require_folders(options.out, options.work)
    start = TrainedHead.read(options.start) if options.start else None
    questions = _questions(options)
    Teacher(source, device=device)  # refuses, before any work, a target that no head can be trained for
    claim(options.work, _origin(options, source))
    texts = _texts(options, questions, start, report)
    teacher = Teacher(source, device=device)
    answers = cache_features(teacher, texts.training, options.work, report=report)
    training, validation = split(answers, seed=options.seed)
    if not training:
        raise ExportError("too few answers to train on and to hold out; give more prompts")
    tokens = torch.tensor(
        candidates(expected_counts(teacher, training), count=options.vocabulary, always=texts.end_tokens),
        device=teacher.device,
    )
    taught = lessons(teacher, tokens, training, options.work, report=report)
    if texts.passages:
        read = cache_features(teacher, texts.passages, options.work, report=report)
        taught += lessons(teacher, tokens, read, options.work, report=report)

    def first() -> DraftHead:
        return go_on(teacher, start.folder) if start else begin(teacher, taught)

    schedule = _schedule(options, start, texts=len(taught))
    held_out = cache_features(teacher, texts.held_out, options.work, report=report) or validation
    # Where an earlier training may have learnt any of these prompts, only what is held out by name can be watched.
    watched = held_out[::WATCHED] if start and texts.held_out else validation
    trained = Trainer(teacher, tokens, taught, watched, schedule, options.work, first).run(watch)
    head = DraftHead(teacher.model).to(teacher.device)
    head.load_state_dict(trained.weights)
    drafts = compare(head, teacher, tokens, held_out)
    data = Data(
        answers=len(training),
        answer_tokens=sum(len(one.tokens) - one.begins for one in training),
        passages=f"{len(texts.passages):,} passages of {_names(options.text)}" if texts.passages else "",
        learnt_tokens=sum(len(one.example.tokens) - one.since for one in taught),
        texts=len(taught),
        sources=_described(options),
        head_tokens=len(tokens),
        coverage=coverage((one.tokens[one.begins :].tolist() for one in held_out), tokens.tolist()),
        overlaps=texts.overlaps,
    )
    with disk_errors(options.out):
        _write(options, source, start, texts, teacher, tokens, trained, data, drafts)
    return Result(options.out, drafts, trained, data)


def _schedule(options: Options, start: TrainedHead | None, *, texts: int) -> Schedule:
    steps = options.epochs * -(-texts // options.batch)
    return Schedule(
        steps=steps,
        batch=options.batch,
        unrolled=options.unrolled,
        learning_rate=options.learning_rate,
        evaluate_every=max(1, steps // MEASUREMENTS),
        seed=options.seed,
        start=start.sha256() if start else "",
    )


@dataclass(frozen=True)
class _Texts:
    training: Sequence[Answer]
    passages: Sequence[Answer]
    held_out: Sequence[Answer]
    end_tokens: frozenset[int]
    vocabulary_sha256: str
    overlaps: tuple[str, ...]


@dataclass(frozen=True)
class _Questions:
    """What can be read before any work: the user's prompts, Python functions, held-out prompts and plain texts."""

    given: Sequence[BenchPrompt]
    code: Sequence[BenchPrompt]
    held_out: Sequence[BenchPrompt]
    plain: Sequence[str]


def _questions(options: Options) -> _Questions:
    if not (options.prompts or options.self_prompts or options.code_prompts):
        raise ExportError("nothing to train on; give --prompts FILE, --self-prompts N or --code-prompts N")
    code = code_prompts(options.code_prompts, seed=options.seed)
    if len(code) < options.code_prompts:
        raise ExportError(f"Python's library has {len(code):,} functions to complete; ask for no more --code-prompts")
    given, held_out = (
        [_named(prompt) for prompt in read_prompts(names)] if names else []
        for names in (options.prompts, options.held_out)
    )
    return _Questions(given, code, held_out, read_texts(options.text))


def _texts(options: Options, questions: _Questions, start: TrainedHead | None, report: Report) -> _Texts:
    """Everything that is decoded; the engines are let go of behind it."""
    recipe = read_recipe(
        None,
        {
            "target": options.target,
            "precision": options.answer_precision,
            "batch": options.answer_batch,
            "context": options.context,
        },
    )
    engines = export(recipe, options.work / "engine", progress=report).path
    work, seed = options.work, options.seed
    with Decoder(engines, load_draft=False) as decoder:
        vocabulary = decoder.manifest.tokenizer.vocabulary_sha256
        if start and start.record.target.vocabulary_sha256 != vocabulary:
            raise ExportError(f"{options.start} was trained for other tokens than the target's; give another --start")
        asked = (
            ask(decoder, options.self_prompts, work / "questions.jsonl", seed=seed, report=report)
            if options.self_prompts
            else []
        )
        among = {prompt.text for prompt in questions.held_out}
        prompts = [prompt for prompt in interleaved(questions.given, asked, questions.code) if prompt.text not in among]
        plain = passages(questions.plain, decoder.tokenizer, limit=options.passages, seed=seed)
        if questions.plain and not plain:
            raise ExportError(f"no text of --text has {SHORTEST} tokens; give longer ones, or leave it out")

        def answers(these: Sequence[BenchPrompt], name: str) -> list[Answer]:
            return answer(decoder, these, work / name, max_new_tokens=options.max_new_tokens, seed=seed, report=report)

        learnt = answers(prompts, "answers.jsonl")
        return _Texts(
            learnt,
            plain,
            answers(questions.held_out, "held-out.jsonl"),
            decoder.tokenizer.end_tokens,
            vocabulary,
            _overlaps(options.held_out, [*learnt, *plain], decoder.tokenizer),
        )


def _named(prompt: BenchPrompt) -> BenchPrompt:
    """Its kind in the report: those that are about code keep their category, all others are chat."""
    is_code = prompt.category == CODE or prompt.category.startswith(f"{CODE} ")
    return prompt if is_code else replace(prompt, category=CHAT)


def _overlaps(names: Sequence[str], learnt: Sequence[Answer], tokenizer: Tokenizer) -> tuple[str, ...]:
    """A sentence for each held-out file: how much of it stands in the answers that are learnt and their prompts."""
    texts = [tokenizer.decode([*one.prompt, *one.answer]) for one in learnt] if names else []
    return tuple(f"{Path(name).name}: {of_prompts(read_prompts([name]), texts)}" for name in names)


def _origin(options: Options, source: Source) -> Mapping[str, str | int]:
    """What answers and hidden states depend on, beside the prompts."""
    return {
        "the target": source.sha256(),
        "--answer-precision": options.answer_precision,
        "--max-new-tokens": options.max_new_tokens,
        "--seed": options.seed,
    }


def _require_folders(*paths: Path) -> None:
    for path in paths:
        existing = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
        if not existing.is_dir():
            raise ExportError(f"{existing} is a file; give a folder")
        if not os.access(existing, os.W_OK):
            raise ExportError(f"{existing} must not be written to; change that or give another folder")


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ExportError(f"--device {name}: no such device; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ExportError(f"--device {name}: heads train on cpu or cuda; use one of these")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ExportError(f"--device {name}: PyTorch sees no such GPU here; use cpu")
    return name


def split(examples: Sequence[Example], *, seed: int) -> tuple[list[Example], list[Example]]:
    """Those to train on, and those to measure on meanwhile: all answers to a 32nd of the prompts, of 2 to 48."""
    prompts = [tuple(one.tokens[: one.begins].tolist()) for one in examples]
    order = list(dict.fromkeys(prompts))
    random.Random(seed).shuffle(order)
    watched = set(order[: min(48, max(2, len(order) // 32))])
    sides: tuple[list[Example], list[Example]] = ([], [])
    for prompt, one in zip(prompts, examples, strict=True):
        sides[prompt in watched].append(one)
    return sides


def compare(
    head: DraftHead, teacher: Teacher, tokens: torch.Tensor, examples: Sequence[Example]
) -> Mapping[str, Mapping[str, HeadFigures]]:
    """Held-out figures of the head and of the drafts that need no training."""
    layers = len(teacher.model.get_decoder().layers)
    middle = layers // 2 - 1
    drafts: Mapping[str, Callable[[Example, int], torch.Tensor]] = {
        "head": HeadDrafting(head, teacher, tokens),
        f"layers:{middle}": LayersOutDrafting(teacher, (middle,)),
        "n-gram": NgramDrafting(teacher),
    }
    return {name: measure(examples, draft, steps=REPORTED_STEPS) for name, draft in drafts.items()}


def _described(options: Options) -> str:
    parts = [f"the prompts of {_names(options.prompts)}"] if options.prompts else []
    if options.self_prompts:
        parts.append(
            f"{options.self_prompts:,} questions that it wrote itself from its chat template (as in 2406.08464)"
        )
    if options.code_prompts:
        parts.append(f"{options.code_prompts:,} functions of Python's standard library to complete")
    return ", and to ".join(parts)


def _names(paths: Sequence[str]) -> str:
    return ", ".join(Path(path).name for path in paths)


def _write(
    options: Options,
    source: Source,
    start: TrainedHead | None,
    texts: _Texts,
    teacher: Teacher,
    tokens: torch.Tensor,
    trained: Trained,
    data: Data,
    drafts: Mapping[str, Mapping[str, HeadFigures]],
) -> None:
    record = HeadRecord(
        SCHEMA_VERSION,
        HeadTarget(source.sha256(), texts.vocabulary_sha256, len(teacher.head), teacher.hidden_size),
        teacher.layers,
        teacher.epsilon,
        HeadTraining(
            options.command,
            options.seed,
            trained.best.step,
            trained.best.step * options.batch * data.learnt_tokens // data.texts,
            options.unrolled,
            start.record.training if start else None,
        ),
        dict(drafts["head"]),
    )
    tensors = {name: tensor.numpy() for name, tensor in trained.weights.items()}
    tensors[TOKENS] = tokens.cpu().int().numpy()
    write_head(options.out, record, tensors, card(record, data, drafts, target=told(source.text)))


def told(target: str) -> str:
    """A target as a card names it: a file or folder without the folders that it is in."""
    return Path(target).name if Path(target).exists() else target
