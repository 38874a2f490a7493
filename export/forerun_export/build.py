"""From a recipe to an engine directory: fetch, build, check, write, and only then take the old one's place."""

import contextlib
import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forerun
from forerun.directory import EngineDirectory
from forerun.errors import EngineError, ExportError
from forerun.inspection import cost_of
from forerun.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    BackendRecord,
    Limits,
    Manifest,
    TokenizerRecord,
)
from forerun.schema import unparse
from forerun.tokenizer import vocabulary_sha256
from forerun_export import download, graph_check
from forerun_export.finishing import Finishing
from forerun_export.head_files import TrainedHead
from forerun_export.models import Float32Models, Sources
from forerun_export.progress import Report, part, silent
from forerun_export.recipe import Recipe
from forerun_export.sampling import save_sampling_graphs
from forerun_export.source_tokenizers import SourceTokenizer
from forerun_export.sources import resolve
from forerun_export.tokenizers_from_gguf import source_tokenizer
from forerun_export.writer import atomic_directory, file_records, megabytes

TOOLS = ("onnxruntime", "mobius-onnx", "optimum-onnx", "onnx-ir", "onnxscript", "torch", "transformers")


@dataclass(frozen=True)
class ExportResult:
    """What an export left at `path`; `built` is False where it was there already."""

    path: Path
    built: bool
    manifest: Manifest

    def summary(self) -> str:
        """For people: one line, and one more for each model whose weights are not float32."""
        size = megabytes(sum(record.bytes for record in self.manifest.files.values()))
        models = [record for record in (self.manifest.target, self.manifest.draft) if record is not None]
        frontends = " and ".join(dict.fromkeys(record.frontend for record in models))
        did = "built" if self.built else "up to date, nothing to do"
        lines = [f"{self.path}: {did} ({size}, graphs by {frontends})"]
        for role, record in (("target", self.manifest.target), ("draft", self.manifest.draft)):
            if record is not None and record.quantization is not None:
                lines.append(f"{role}: {cost_of(record.precision, record.quantization)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The object that `forerun export --json` prints."""
        models = {"target": self.manifest.target, "draft": self.manifest.draft}
        costs = {role: record.quantization for role, record in models.items() if record is not None}
        parity = self.manifest.target.parity
        return {
            "path": str(self.path),
            "built": self.built,
            "bytes": sum(record.bytes for record in self.manifest.files.values()),
            "parity_error": parity.max_error if parity else None,
            "quantization": {role: unparse(cost) for role, cost in costs.items() if cost is not None},
        }


def export(recipe: Recipe, out: Path, *, force: bool = False, progress: Report = silent) -> ExportResult:
    """Build the engines of `recipe` at `out`, unless the same are there and whole.

    Raises ExportError for whatever stands in the way; `out` is then as it was.
    """
    sources = _resolve(recipe, progress)
    if not force and (found := _already_built(out, sources.key)) is not None:
        return ExportResult(out, False, found)
    with atomic_directory(out) as folder:
        _Build(recipe, sources, folder, progress).run()
    return ExportResult(out, True, Manifest.read(out / MANIFEST_NAME))


def _resolve(recipe: Recipe, progress: Report) -> Sources:
    if recipe.target.download is not None:
        progress("fetching the checkpoint")
        download.ensure(recipe.target.download, Path(recipe.target.source), part(progress, "unpacking the checkpoint"))
    progress("hashing the checkpoint")
    target = resolve(recipe.target.source)
    draft = resolve(recipe.draft.source) if recipe.draft and recipe.draft.source else None
    head = TrainedHead.read(Path(recipe.draft.head)) if recipe.draft and recipe.draft.head else None
    target_sha256 = target.sha256()
    draft_sha256 = draft.sha256() if draft else head.sha256() if head else None
    key = recipe.sha256(
        target_source_sha256=target_sha256,
        draft_source_sha256=draft_sha256,
        exporter_version=f"{forerun.__version__} {_versions()} {_code_sha256()}",
    )
    return Sources(target, draft, head, target_sha256, draft_sha256, key)


def _already_built(out: Path, key: str) -> Manifest | None:
    try:
        manifest = EngineDirectory.open(out).manifest
    except EngineError:  # not there, of another schema or damaged: build it
        return None
    return manifest if manifest.recipe_sha256 == key else None


def _versions() -> dict[str, str]:
    """Of the tools that are there: a graph that was exported before needs neither PyTorch nor a builder."""
    found = {}
    for tool in TOOLS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[tool] = importlib.metadata.version(tool)
    return found


def _code_sha256() -> str:
    """Of the files that decide what an engine directory holds, so that engines of older code are built again."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(file for file in package.rglob("*") if file.suffix in (".py", ".txt")):
        if not {"certify", "bench", "measure.py"} & set(file.parts):
            digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


class _Build:
    """One export into an empty folder."""

    def __init__(self, recipe: Recipe, sources: Sources, folder: Path, progress: Report) -> None:
        self._recipe = recipe
        self._sources = sources
        self._folder = folder
        self._progress = progress

    def run(self) -> None:
        """Write every file of the engine directory, the manifest last, and check the graphs against it."""
        tokenizer = self._tokenizer()
        float32 = Float32Models(self._recipe, self._sources, self._folder, tokenizer, self._progress)
        models = float32.write()
        self._progress("writing the sampling graphs")
        (self._folder / "sampling").mkdir()
        sampling = save_sampling_graphs(self._folder / "sampling", models["target"].architecture.vocabulary_size)
        tokenizer.save(self._folder)
        finishing = Finishing(self._recipe, self._folder, tokenizer, self._progress)
        records = finishing.run(models, float32.compare(models))
        self._progress("hashing the engines")
        limits = self._recipe.limits
        Manifest(
            schema=SCHEMA_VERSION,
            forerun=forerun.__version__,
            recipe_sha256=self._sources.key,
            target=records["target"],
            draft=records.get("draft"),
            sampling={name: f"sampling/{path.name}" for name, path in sampling.items()},
            tokenizer=TokenizerRecord(
                vocabulary_sha256=vocabulary_sha256(tokenizer.tokenizer),
                end_tokens=tokenizer.end_tokens,
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
            ),
            limits=Limits(limits.batch, limits.context, limits.draft_length),
            backend=BackendRecord("onnxruntime", self._recipe.device, _versions()),
            files=file_records(self._folder),
        ).write(self._folder / MANIFEST_NAME)
        if found := graph_check.in_directory(EngineDirectory.open(self._folder)):
            raise ExportError(f"{found[0]}; use another front end or precision")

    def _tokenizer(self) -> SourceTokenizer:
        """The pair's tokenizer. Raises ExportError unless the draft has the target's token map."""
        tokenizer = source_tokenizer(self._sources.target.path)
        head, target = self._sources.head, self._sources.target
        if head is not None and head.record.target.vocabulary_sha256 != vocabulary_sha256(tokenizer.tokenizer):
            raise ExportError(
                f"the head {head.path} was trained for other tokens than those of {target.text}; train one"
            )
        if self._sources.draft is not None:
            own = source_tokenizer(self._sources.draft.path)
            if vocabulary_sha256(own.tokenizer) != vocabulary_sha256(tokenizer.tokenizer):
                sizes = [each.tokenizer.get_vocab_size() for each in (own, tokenizer)]
                raise ExportError(
                    f"{self._sources.draft.text} cannot draft for {self._sources.target.text}: their token maps "
                    f"differ ({sizes[0]} and {sizes[1]} tokens); choose a draft of the same family"
                )
        return tokenizer
