"""Target and draft in float32: built, written, and compared with their checkpoints.

Graphs that are to be quantized lie in a folder of their own (FLOAT32) until then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from forerun.errors import ExportError
from forerun.manifest import Architecture, Parity
from forerun_export import parity
from forerun_export.frontends import Decoder, build_decoder
from forerun_export.graph_files import save_graph, save_sharing_graph
from forerun_export.graph_runner import GraphRunner
from forerun_export.head_files import TrainedHead
from forerun_export.precision import weight_bytes
from forerun_export.progress import Report, part
from forerun_export.recipe import Precision, Recipe
from forerun_export.source_tokenizers import SourceTokenizer
from forerun_export.sources import Source
from forerun_export.writer import require_space

COMPARED_TEXTS = (
    "Speculative decoding drafts several tokens and checks them in one pass, without changing what is said.",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
)
"""Real text beside the prompts made by rule: rare activations differ from those of random tokens."""
GRAPH_NAME, WEIGHTS_NAME = "model.onnx", "model.onnx.data"
FLOAT32 = ".float32"


@dataclass(frozen=True)
class Sources:
    """The checkpoints of a recipe, and the key under which their engines are recognised."""

    target: Source
    draft: Source | None  # None: no draft, or one made of the target's layers, or a head
    head: TrainedHead | None
    target_sha256: str
    draft_sha256: str | None
    key: str


@dataclass(frozen=True)
class Model:
    """A model whose graph and weights lie in a folder, and are no longer in memory."""

    role: str
    owner: str  # the role whose weight file it reads
    source: Source  # of a head, the target's
    source_sha256: str
    architecture: Architecture
    frontend: str
    layers_left_out: tuple[int, ...]
    precision: Precision
    head: TrainedHead | None = None

    @property
    def source_text(self) -> str:
        """What the user wrote."""
        return self.source.text if self.head is None else f"head:{self.head.path}"

    @property
    def graph(self) -> str:
        """The graph's path in the engine directory."""
        return f"{self.role}/{GRAPH_NAME}"

    @property
    def weights(self) -> str:
        """The weight file's path in the engine directory."""
        return f"{self.owner}/{WEIGHTS_NAME}"

    def float32_folder(self, folder: Path) -> Path:
        """Where the model lies in float32, while the engine directory `folder` is being built."""
        return folder if self.precision == "fp32" else folder / FLOAT32

    def write(self, graph: ir.Model, folder: Path, *, report: Report) -> None:
        """Write a graph of the model, and its weights unless they are another's. Raises ExportError without room."""
        (folder / self.role).mkdir(parents=True, exist_ok=True)
        if self.owner == self.role:
            require_space(folder, weight_bytes(graph))
            progress = part(report, f"writing the {self.role}'s weights")
            save_graph(graph, folder / self.graph, folder / self.weights, progress=progress)
        else:
            save_sharing_graph(graph, folder / self.graph, folder / self.owner / GRAPH_NAME)

    def runner(self, folder: Path) -> GraphRunner:
        """The graph in `folder`, loaded."""
        return GraphRunner(folder / self.graph, weights_folder=(folder / self.weights).parent)


class Float32Models:
    """The models of one export, on their way into an empty folder."""

    def __init__(
        self, recipe: Recipe, sources: Sources, folder: Path, tokenizer: SourceTokenizer, progress: Report
    ) -> None:
        self._recipe = recipe
        self._sources = sources
        self._folder = folder
        self._tokenizer = tokenizer
        self._progress = progress

    def write(self) -> dict[str, Model]:
        """Write target and draft in float32, the target first. Raises ExportError for what cannot be built."""
        sources, draft = self._sources, self._recipe.draft
        target = self._build("target", sources.target)
        if sources.head is not None:
            return self._with_head(target, sources.head)
        models = {"target": self._save("target", target, sources.target, sources.target_sha256)}
        if draft is not None and draft.source is None:
            decoder = target.without_layers(draft.layers_left_out)
            models["draft"] = self._save("draft", decoder, sources.target, sources.target_sha256)
        del target
        if sources.draft is not None and sources.draft_sha256 is not None:
            decoder = self._build("draft", sources.draft)
            models["draft"] = self._save("draft", decoder, sources.draft, sources.draft_sha256)
        if "draft" in models:
            _check_vocabulary_sizes(models["target"], models["draft"])
        return models

    def _with_head(self, target: Decoder, head: TrainedHead) -> dict[str, Model]:
        """The target, which keeps features for its head, and the head."""
        sources, limits, numbers = self._sources, self._recipe.limits, target.architecture
        expected, found = head.record.target, (numbers.hidden_size, numbers.vocabulary_size)
        if (expected.hidden_size, expected.vocabulary_size) != found:
            raise ExportError(
                f"the head {head.path} is for a hidden size of {expected.hidden_size} and {expected.vocabulary_size} "
                f"tokens, {sources.target.text} has {found[0]} and {found[1]}; train one for it"
            )
        from forerun_export.head_graph import build_head, with_features  # needs PyTorch, as few exports do

        self._progress("building the draft head")
        decoder = build_head(head, sources.target, target, context=limits.context, frontend=self._recipe.frontend)
        kept = with_features(target, head)
        return {
            "target": self._save("target", kept, sources.target, sources.target_sha256),
            "draft": self._save("draft", decoder, sources.target, head.sha256(), head=head),
        }

    def _build(self, role: str, source: Source) -> Decoder:
        return build_decoder(
            source,
            context=self._recipe.limits.context,
            frontend=self._recipe.frontend,
            report=lambda step, done=0, total=1: self._progress(f"building the {role}: {step}", done, total),
        )

    def _save(
        self, role: str, decoder: Decoder, source: Source, sha256: str, *, head: TrainedHead | None = None
    ) -> Model:
        draft = self._recipe.draft
        model = Model(
            role=role,
            owner="target" if decoder.layers_left_out else role,
            source=source,
            source_sha256=sha256,
            architecture=decoder.architecture,
            frontend=decoder.frontend,
            layers_left_out=decoder.layers_left_out,
            precision=draft.precision if role == "draft" and draft is not None else self._recipe.target.precision,
            head=head,
        )
        model.write(decoder.model, model.float32_folder(self._folder), report=self._progress)
        return model

    def compare(self, models: Mapping[str, Model]) -> dict[str, Parity]:
        """Each written model's distance from its checkpoint. Raises ExportError where rounding cannot explain it."""
        texts = [self._tokenizer.tokenizer.encode(text).ids for text in COMPARED_TEXTS]
        found: dict[str, Parity] = {}
        decoders = [model for model in models.values() if model.head is None]
        for source in {model.source for model in decoders}:
            same_source = [model for model in decoders if model.source == source]
            expected = parity.references(
                source,
                same_source[0].architecture.vocabulary_size,
                context=self._recipe.limits.context,
                texts=texts,
                variants=[model.layers_left_out for model in same_source],
                report=self._progress,
            )
            for model in same_source:
                self._progress(f"comparing the {model.role} with its checkpoint")
                folder = model.float32_folder(self._folder)
                found[model.role] = parity.check(
                    folder / model.graph,
                    expected[model.layers_left_out],
                    weights_folder=(folder / model.weights).parent,
                )
        return found | self._compare_head(models, texts)

    def _compare_head(self, models: Mapping[str, Model], texts: Sequence[Sequence[int]]) -> dict[str, Parity]:
        """Of the draft, if it is a head: with its target before it, as it decodes."""
        target, head = models["target"], self._sources.head
        if head is None:
            return {}
        from forerun_export import head_parity

        context = self._recipe.limits.context
        expected = head_parity.reference(head, target.source, context=context, texts=texts, report=self._progress)
        self._progress("comparing the draft head with its checkpoint")
        paths = {role: model.float32_folder(self._folder) / model.graph for role, model in models.items()}
        return {"draft": head_parity.check(paths["draft"], paths["target"], head.tokens, expected)}


def _check_vocabulary_sizes(target: Model, draft: Model) -> None:
    """Raises ExportError for heads of different widths: q could not be held against p."""
    sizes = draft.architecture.vocabulary_size, target.architecture.vocabulary_size
    if sizes[0] != sizes[1]:
        raise ExportError(
            f"{draft.source.text} gives logits for {sizes[0]} tokens, {target.source.text} for {sizes[1]}; "
            "choose a draft of the same family"
        )
