"""What is compared: forerun with each of its drafts, and what else people would run the same checkpoint with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.directory import EngineDirectory
from forerun.errors import ExportError, RequestError
from forerun.manifest import Manifest, ModelRecord
from forerun_export.bench.processes import WorkerSpec
from forerun_export.bench.systems import how_to_install, is_installed
from forerun_export.sources import resolve

PLAIN = "forerun-plain"
# Baseline: label, kind of worker, and the engine whose output it must reproduce.
_KINDS = {
    "torch": ("PyTorch eager", "torch", "torch"),
    "torch-assisted": ("PyTorch assisted", "torch", "torch"),
    "optimum": ("Optimum ONNX Runtime", "optimum", "optimum"),
    "onnxruntime-genai": ("onnxruntime-genai", "genai", "onnxruntime-genai"),
}
BASELINES = ("torch", "torch-assisted", "optimum")
"""What is compared where nothing else is said."""
KNOWN = tuple(_KINDS)
GENAI_NGRAM = "onnxruntime-genai-ngram"
GENAI_PRECISIONS = ("fp32", "int8", "int4")
GENAI_ACCURACY_LEVEL = 4
"""Of products with weights in 8 or 4 bits: activations in 8 bits, the fastest on a CPU and its builder's own choice."""
DRAFTS = {"model": "model draft", "ngram": "n-gram draft", "auto": "auto"}
SWEPT = ("model", "ngram")
PROCESS_BYTES = 400 << 20
# Of the float32 weights, in memory at the same time. A model that is still to be made takes most while that is done.
COPIES = {"torch": 1.2, "optimum": 2.2, "genai": 2.2}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A bar of the report.

    `worker` is the process that runs it. `plain` is the engine whose output this one must reproduce where that can be
    checked; its own name for plain decoding. `draft_length` None is an adaptive K. `swept` ones are shown
    against K only.
    """

    name: str
    label: str
    worker: str
    plain: str
    draft: str = "none"
    draft_length: int | None = None
    swept: bool = False

    @property
    def is_forerun(self) -> bool:
        """Whether it is forerun, not another library."""
        return self.plain == PLAIN

    @property
    def is_plain(self) -> bool:
        """Whether it decodes without speculation."""
        return self.plain == self.name


@dataclass(frozen=True)
class Line:
    """All engines to compare, the processes they need, and those that cannot be had, with the reason."""

    engines: Sequence[Engine]
    workers: Sequence[WorkerSpec]
    unavailable: dict[str, str]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the user wants compared. `draft_length` None lets K adapt; `sweep` are further fixed ones."""

    baselines: Sequence[str] = BASELINES
    draft_length: int | None = None
    sweep: Sequence[int] = ()
    checkpoint: str | None = None
    draft_checkpoint: str | None = None


def line_up(directory: EngineDirectory, choice: Choice, *, threads: int, available_bytes: int | None) -> Line:
    """The engines of a comparison. Raises RequestError for an unknown baseline or a K beyond the engines' limit.

    Every worker has a process of its own, unless forerun's then do not fit into memory together: they share one.
    """
    _check(choice, directory.manifest)
    engines = _forerun_engines(directory.manifest, choice)
    workers = _forerun_workers(directory, threads)
    if available_bytes is not None and sum(one.bytes for one in workers) > available_bytes:
        shared = workers[1]
        workers = [shared]
        engines = [replace(engine, worker=shared.name) for engine in engines]
    others = _Baselines(directory.manifest, choice, threads)
    for name in choice.baselines:
        others.add(name)
    return Line([*others.engines, *engines], [*workers, *others.workers], others.unavailable, others.notes)


def _check(choice: Choice, manifest: Manifest) -> None:
    if unknown := [name for name in choice.baselines if name not in KNOWN]:
        raise RequestError(f"unknown baseline {unknown[0]!r}; known: {', '.join(KNOWN)}, none")
    limit = manifest.limits.draft_length
    for length in (choice.draft_length or 0, *choice.sweep):
        if not 0 <= length <= limit:
            raise RequestError(f"draft length {length}: these engines were exported for 0 to {limit}; choose within")


def _forerun_engines(manifest: Manifest, choice: Choice) -> list[Engine]:
    plain = Engine(name=PLAIN, label=f"forerun plain ({manifest.target.precision})", worker=PLAIN, plain=PLAIN)
    drafted = [
        Engine(
            name=f"forerun-{draft}",
            label=_label(draft, manifest),
            worker=f"forerun-{draft}",
            plain=PLAIN,
            draft=draft,
            draft_length=None if draft == "auto" else choice.draft_length,
        )
        for draft in DRAFTS
    ]
    swept = [
        Engine(
            name=f"forerun-{draft}-{length}",
            label=f"{_label(draft, manifest)}, K = {length}",
            worker=f"forerun-{draft}",
            plain=PLAIN,
            draft=draft,
            draft_length=length,
            swept=True,
        )
        for draft in SWEPT
        for length in sorted(set(choice.sweep) - {0})
    ]
    return [plain, *drafted, *swept]


def _label(draft: str, manifest: Manifest) -> str:
    if draft != "model" or manifest.draft is None:
        return f"forerun, {DRAFTS[draft]}"
    name = "trained head" if manifest.draft.is_head else DRAFTS[draft]
    return f"forerun, {name} ({manifest.draft.precision})"


def _forerun_workers(directory: EngineDirectory, threads: int) -> list[WorkerSpec]:
    """A process each; those without a model draft do not load it."""
    manifest = directory.manifest
    target, draft = manifest.target, manifest.draft
    sizes = {record.weights: manifest.files[record.weights].bytes for record in (target, draft) if record}
    both = sum(sizes.values())
    workers = []
    for name in ("none", "model", "ngram", "auto"):
        loads = name in ("model", "auto")
        arguments = {"directory": str(directory.path), "threads": threads, "load_draft": loads}
        needed = PROCESS_BYTES + int(1.2 * (both if loads else sizes[target.weights]))
        workers.append(WorkerSpec(PLAIN if name == "none" else f"forerun-{name}", "forerun", arguments, needed))
    return workers


class _Baselines:
    """Collects other libraries' engines, or why they cannot be had."""

    def __init__(self, manifest: Manifest, choice: Choice, threads: int) -> None:
        self.engines: list[Engine] = []
        self.workers: list[WorkerSpec] = []
        self.unavailable: dict[str, str] = {}
        self.notes: list[str] = []
        self._manifest = manifest
        self._choice = choice
        self._common = {"threads": threads, "end_tokens": list(manifest.tokenizer.end_tokens)}
        precision = manifest.target.precision
        self._precision = "fp32" if precision == "fp32" else f"fp32; forerun's target is {precision}"

    def add(self, name: str) -> None:
        """Add one of KNOWN."""
        label, kind, plain = _KINDS[name]
        precision = self._genai_precision() if kind == "genai" else self._precision
        self.engines.append(Engine(name=name, label=f"{label} ({precision})", worker=name, plain=plain))
        if kind == "genai":
            drafted = f"{label}, n-gram draft ({precision})"
            self.engines.append(Engine(name=GENAI_NGRAM, label=drafted, worker=name, plain=plain, draft="ngram"))
        try:
            arguments, weights = self._more(name)
            checkpoint = self._checkpoint(self._manifest.target, self._choice.checkpoint, "--checkpoint")
        except ExportError as error:
            self.unavailable |= {engine.name: str(error) for engine in self.engines if engine.worker == name}
            return
        weights += self._weight_bytes(self._manifest.target)
        needed = PROCESS_BYTES + int(COPIES[kind] * weights)
        arguments |= {"checkpoint": checkpoint, **self._common}
        self.workers.append(WorkerSpec(name, kind, arguments, needed))

    def _genai_precision(self) -> str:
        precision = self._manifest.target.precision
        return precision if precision == "fp32" else f"{precision}, accuracy level {GENAI_ACCURACY_LEVEL}"

    def _more(self, name: str) -> tuple[dict[str, Any], float]:
        """What a worker is told beside the target's checkpoint, and the bytes of weights beside the target's."""
        if name == "torch-assisted":
            return self._assistant()
        if name != "onnxruntime-genai":
            return {}, 0.0
        if not is_installed("onnxruntime_genai"):
            raise ExportError(f"needs the package onnxruntime-genai; {how_to_install('onnxruntime_genai')}")
        precision = self._manifest.target.precision
        if precision not in GENAI_PRECISIONS:
            raise ExportError(f"its builder makes no model in {precision} for a CPU; leave it out")
        return {"precision": precision}, 0.0

    def _assistant(self) -> tuple[dict[str, Any], float]:
        """What names the assistant to the worker, and the bytes of weights of its own."""
        draft = self._manifest.draft
        if draft is None:
            raise ExportError("this engine directory has no draft to assist with; export one with --draft")
        if draft.is_head:
            raise ExportError(
                "the draft is a trained head, which reads hidden states that no assistant model is given; "
                "export a draft model to measure assisted generation with"
            )
        if draft.layers_left_out:
            return {"left_out": list(draft.layers_left_out)}, 0.0
        checkpoint = self._checkpoint(draft, self._choice.draft_checkpoint, "--draft-checkpoint")
        return {"assistant": checkpoint}, self._weight_bytes(draft)

    def _weight_bytes(self, record: ModelRecord) -> float:
        """Of the model's weights in float32."""
        if record.quantization is not None:
            return record.quantization.bytes_fp32
        return self._manifest.files[record.weights].bytes

    def _checkpoint(self, record: ModelRecord, given: str | None, option: str) -> str:
        """The checkpoint that a model was built from, or the given one. Raises ExportError where it is not here."""
        try:
            source = resolve(given or record.source)
        except ExportError as error:
            reason = str(error) if given else f"its checkpoint {record.source} is not here; give it with {option} SRC"
            raise ExportError(reason) from error
        if source.sha256() != record.source_sha256:
            note = f"{source.text} is not the file that the engines were built from: its SHA-256 is another"
            self.notes += [note] if note not in self.notes else []
        return str(source.path.absolute())
