"""From a recipe to an engine directory: fetch, build, check, write, and only then take the old one's place."""

import hashlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forerun
from forerun.directory import EngineDirectory
from forerun.errors import EngineError, ExportError
from forerun.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Architecture,
    BackendRecord,
    Limits,
    Manifest,
    ModelRecord,
    Parity,
    TokenizerRecord,
)
from forerun.tokenizer import vocabulary_sha256
from forerun_export import download, parity
from forerun_export.frontends import Decoder, build_decoder
from forerun_export.graph_files import save_graph, save_sharing_graph
from forerun_export.progress import Report, part, silent
from forerun_export.recipe import Recipe
from forerun_export.sampling import save_sampling_graphs
from forerun_export.source_tokenizers import SourceTokenizer
from forerun_export.sources import Source, resolve
from forerun_export.tokenizers_from_gguf import source_tokenizer
from forerun_export.writer import atomic_directory, file_records, megabytes, require_space

TOOLS = ("onnxruntime", "mobius-onnx", "onnx-ir", "onnxscript", "torch", "transformers")
COMPARED_TEXTS = (
    "Speculative decoding drafts several tokens and checks them in one pass, without changing what is said.",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
)
"""Real text beside the prompts made by rule: rare activations differ from those of random tokens."""
GRAPH_NAME, WEIGHTS_NAME = "model.onnx", "model.onnx.data"


@dataclass(frozen=True)
class ExportResult:
    """What an export left at `path`; `built` is False where it was there already."""

    path: Path
    built: bool
    manifest: Manifest

    def summary(self) -> str:
        """One line for people."""
        size = megabytes(sum(record.bytes for record in self.manifest.files.values()))
        return f"{self.path}: {'built' if self.built else 'up to date, nothing to do'} ({size})"

    def to_json(self) -> dict[str, Any]:
        """The object that `forerun export --json` prints."""
        parity = self.manifest.target.parity
        return {
            "path": str(self.path),
            "built": self.built,
            "bytes": sum(record.bytes for record in self.manifest.files.values()),
            "parity_error": parity.max_error if parity else None,
        }


@dataclass(frozen=True)
class _Sources:
    """The checkpoints of a recipe, and the key under which their engines are recognised."""

    target: Source
    draft: Source | None  # None: no draft, or one made of the target's layers
    target_sha256: str
    draft_sha256: str | None
    key: str


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


def _resolve(recipe: Recipe, progress: Report) -> _Sources:
    if recipe.target.download is not None:
        progress("fetching the checkpoint")
        download.ensure(recipe.target.download, Path(recipe.target.source), part(progress, "unpacking the checkpoint"))
    progress("hashing the checkpoint")
    target = resolve(recipe.target.source)
    draft = resolve(recipe.draft.source) if recipe.draft and recipe.draft.source else None
    target_sha256 = target.sha256()
    draft_sha256 = draft.sha256() if draft else None
    key = recipe.sha256(
        target_source_sha256=target_sha256,
        draft_source_sha256=draft_sha256,
        exporter_version=f"{forerun.__version__} {_versions()} {_code_sha256()}",
    )
    return _Sources(target, draft, target_sha256, draft_sha256, key)


def _already_built(out: Path, key: str) -> Manifest | None:
    try:
        manifest = EngineDirectory.open(out).manifest
    except EngineError:  # not there, of another schema or damaged: build it
        return None
    return manifest if manifest.recipe_sha256 == key else None


def _versions() -> dict[str, str]:
    return {tool: importlib.metadata.version(tool) for tool in TOOLS}


@dataclass(frozen=True)
class _Written:
    """A model whose graph and weights lie in the folder, and are no longer in memory."""

    role: str
    weights: str
    source: Source
    source_sha256: str
    architecture: Architecture
    frontend: str
    layers_left_out: tuple[int, ...]

    @property
    def graph(self) -> str:
        """The graph's path in the engine directory."""
        return f"{self.role}/{GRAPH_NAME}"


def _code_sha256() -> str:
    """Of the modules that decide what an engine directory holds, so that engines of older code are built again."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for module in sorted(package.rglob("*.py")):
        if not {"certify", "bench", "measure.py"} & set(module.parts):
            digest.update(module.relative_to(package).as_posix().encode() + b"\0" + module.read_bytes())
    return digest.hexdigest()


class _Build:
    """One export into an empty folder."""

    def __init__(self, recipe: Recipe, sources: _Sources, folder: Path, progress: Report) -> None:
        self._recipe = recipe
        self._sources = sources
        self._folder = folder
        self._progress = progress

    def run(self) -> None:
        """Write every file of the engine directory, the manifest last."""
        tokenizer = self._tokenizer()
        vocabulary = vocabulary_sha256(tokenizer.tokenizer)
        written = self._write_models()
        self._progress("writing the sampling graphs")
        (self._folder / "sampling").mkdir()
        sampling = save_sampling_graphs(self._folder / "sampling", written["target"].architecture.vocabulary_size)
        tokenizer.save(self._folder)
        found = self._compare(written, tokenizer)
        records = {role: _record(model, vocabulary, found[role]) for role, model in written.items()}
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
                vocabulary_sha256=vocabulary,
                end_tokens=tokenizer.end_tokens,
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
            ),
            limits=Limits(limits.batch, limits.context, limits.draft_length),
            backend=BackendRecord("onnxruntime", self._recipe.device, _versions()),
            files=file_records(self._folder),
        ).write(self._folder / MANIFEST_NAME)

    def _tokenizer(self) -> SourceTokenizer:
        """The pair's tokenizer. Raises ExportError unless the draft has the target's token map."""
        tokenizer = source_tokenizer(self._sources.target.path)
        if self._sources.draft is not None:
            own = source_tokenizer(self._sources.draft.path)
            if vocabulary_sha256(own.tokenizer) != vocabulary_sha256(tokenizer.tokenizer):
                sizes = [each.tokenizer.get_vocab_size() for each in (own, tokenizer)]
                raise ExportError(
                    f"{self._sources.draft.text} cannot draft for {self._sources.target.text}: their token maps "
                    f"differ ({sizes[0]} and {sizes[1]} tokens); choose a draft of the same family"
                )
        return tokenizer

    def _write_models(self) -> dict[str, _Written]:
        """Write graphs and weights of target and draft; one model's weights are in memory at a time."""
        sources, draft = self._sources, self._recipe.draft
        target = self._build("target", sources.target)
        written = {"target": self._save("target", target, sources.target, sources.target_sha256)}
        if draft is not None and draft.source is None:
            decoder = target.without_layers(draft.layers_left_out)
            written["draft"] = self._save("draft", decoder, sources.target, sources.target_sha256)
        del target
        if sources.draft is not None and sources.draft_sha256 is not None:
            decoder = self._build("draft", sources.draft)
            written["draft"] = self._save("draft", decoder, sources.draft, sources.draft_sha256)
        if "draft" in written:
            _check_vocabulary_sizes(written["target"], written["draft"])
        return written

    def _build(self, role: str, source: Source) -> Decoder:
        return build_decoder(
            source,
            context=self._recipe.limits.context,
            frontend=self._recipe.frontend,
            report=lambda step, done=0, total=1: self._progress(f"building the {role}: {step}", done, total),
        )

    def _save(self, role: str, decoder: Decoder, source: Source, sha256: str) -> _Written:
        folder = self._folder / role
        folder.mkdir()
        owner = "target" if decoder.layers_left_out else role
        if owner == role:
            require_space(self._folder, _weight_bytes(decoder))
            progress = part(self._progress, f"writing the {role}'s weights")
            save_graph(decoder.model, folder / GRAPH_NAME, folder / WEIGHTS_NAME, progress=progress)
        else:
            save_sharing_graph(decoder.model, folder / GRAPH_NAME, self._folder / owner / GRAPH_NAME)
        return _Written(
            role=role,
            weights=f"{owner}/{WEIGHTS_NAME}",
            source=source,
            source_sha256=sha256,
            architecture=decoder.architecture,
            frontend=decoder.frontend,
            layers_left_out=decoder.layers_left_out,
        )

    def _compare(self, written: Mapping[str, _Written], tokenizer: SourceTokenizer) -> dict[str, Parity]:
        """Each written model's distance from its checkpoint. Raises ExportError where rounding cannot explain it."""
        texts = [tokenizer.tokenizer.encode(text).ids for text in COMPARED_TEXTS]
        found: dict[str, Parity] = {}
        for source in {model.source for model in written.values()}:
            models = [model for model in written.values() if model.source == source]
            expected = parity.references(
                source,
                models[0].architecture.vocabulary_size,
                context=self._recipe.limits.context,
                texts=texts,
                variants=[model.layers_left_out for model in models],
                report=self._progress,
            )
            for model in models:
                self._progress(f"comparing the {model.role} with its checkpoint")
                found[model.role] = parity.check(
                    self._folder / model.graph,
                    expected[model.layers_left_out],
                    weights_folder=(self._folder / model.weights).parent,
                )
        return found


def _record(model: _Written, vocabulary: str, found: Parity) -> ModelRecord:
    return ModelRecord(
        graph=model.graph,
        weights=model.weights,
        source=model.source.text,
        source_sha256=model.source_sha256,
        architecture=model.architecture,
        precision="fp32",
        frontend=model.frontend,
        layers_left_out=model.layers_left_out,
        vocabulary_sha256=vocabulary,
        parity=found,
    )


def _weight_bytes(decoder: Decoder) -> int:
    tensors = (value.const_value for value in decoder.model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _check_vocabulary_sizes(target: _Written, draft: _Written) -> None:
    """Raises ExportError for heads of different widths: q could not be held against p."""
    sizes = draft.architecture.vocabulary_size, target.architecture.vocabulary_size
    if sizes[0] != sizes[1]:
        raise ExportError(
            f"{draft.source.text} gives logits for {sizes[0]} tokens, {target.source.text} for {sizes[1]}; "
            "choose a draft of the same family"
        )
