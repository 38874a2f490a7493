"""From a model's float32 graph to the one that is shipped: quantized, with a smaller head, and checked again.

Weights are mapped from the float32 file and written one at a time, so memory holds one packed model at most.
"""

import gc
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import onnx_ir as ir

from forerun.errors import ExportError
from forerun.manifest import ModelRecord, Parity, Quantization
from forerun.tokenizer import vocabulary_sha256
from forerun_export import calibration, quality, row_check
from forerun_export.graph_files import load_graph, save_sharing_graph
from forerun_export.graph_runner import Floats, GraphRunner
from forerun_export.head_runner import HeadRunner, Runner
from forerun_export.models import FLOAT32, GRAPH_NAME, Model
from forerun_export.passes import smaller_head
from forerun_export.precision import products, quantize, weight_bytes
from forerun_export.progress import Report
from forerun_export.recipe import Recipe
from forerun_export.source_tokenizers import SourceTokenizer


class Finishing:
    """Finishes the models of one export in its folder."""

    def __init__(self, recipe: Recipe, folder: Path, tokenizer: SourceTokenizer, progress: Report) -> None:
        self._recipe = recipe
        self._folder = folder
        self._tokenizer = tokenizer
        self._progress = progress
        self._largest_inputs: dict[str, Mapping[str, Floats]] = {}

    def run(self, models: Mapping[str, Model], found: Mapping[str, Parity | None]) -> dict[str, ModelRecord]:
        """Finish all, the target first, whose weights a draft may share; what the manifest says of each.

        Raises ExportError if a row's bits would depend on the other rows of a call.
        """
        records = {role: self._finish(model, found.get(role)) for role, model in models.items()}
        shutil.rmtree(self._folder / FLOAT32, ignore_errors=True)
        return records

    def _finish(self, model: Model, found: Parity | None) -> ModelRecord:
        quantization = self._quantize(model) if model.precision != "fp32" else None
        head_tokens = len(model.head.tokens) if model.head is not None else self._cut_head(model)
        self._progress(f"checking the {model.role}'s rows")
        row_check.check(self._runner(model), precision=model.precision)
        return ModelRecord(
            graph=model.graph,
            weights=model.weights,
            source=model.source_text,
            source_sha256=model.source_sha256,
            architecture=model.architecture,
            precision=model.precision,
            frontend=model.frontend,
            layers_left_out=model.layers_left_out,
            vocabulary_sha256=vocabulary_sha256(self._tokenizer.tokenizer),
            parity=found,
            quantization=quantization,
            head_tokens=head_tokens,
            feature_layers=model.head.record.feature_layers if model.head is not None else (),
        )

    def _runner(self, model: Model) -> Runner:
        """The finished model, loaded; a head with its target."""
        runner = model.runner(self._folder)
        return runner if model.head is None else self._behind_target(runner)

    def _behind_target(self, head: GraphRunner) -> HeadRunner:
        return HeadRunner(head, GraphRunner(self._folder / "target" / GRAPH_NAME))

    def _quantize(self, model: Model) -> Quantization:
        """Write the model in its precision, and compare it with itself in float32."""
        plain = model.float32_folder(self._folder)
        logits = plain / "logits"
        graph = load_graph(plain / model.graph, (plain / model.weights).parent)
        self._read_in_float32(model, graph, logits)
        bytes_fp32 = weight_bytes(graph)
        quantize(graph, model.precision, largest_inputs=self._largest_inputs[model.owner])
        model.write(graph, self._folder, report=self._progress)
        counts, num_bytes = products(graph), weight_bytes(graph)
        del graph
        gc.collect()
        self._progress(f"reading a text with the {model.role} in {model.precision}")
        distance = quality.distance(self._runner(model), self._pieces(quality.text()), logits)
        logits.unlink()
        return Quantization(products=counts, bytes=num_bytes, bytes_fp32=bytes_fp32, **asdict(distance))

    def _read_in_float32(self, model: Model, graph: ir.Model, logits: Path) -> None:
        """Keep the logits of the quality text; and what products read, unless the weights are another model's."""
        self._progress(f"reading a text with the {model.role} in fp32")
        plain = model.float32_folder(self._folder)
        observed = graph.clone()
        calibration.observe(observed)
        path = plain / model.role / "observed.onnx"
        save_sharing_graph(observed, path, plain / model.owner / GRAPH_NAME)
        graph_runner = GraphRunner(path, weights_folder=(plain / model.weights).parent)
        runner = graph_runner if model.head is None else self._behind_target(graph_runner)
        if model.owner == model.role:
            pieces = self._pieces(calibration.text())
            self._largest_inputs[model.role] = calibration.largest_inputs(runner, pieces)
        quality.save_logits(runner, self._pieces(quality.text()), logits)

    def _pieces(self, text: str) -> list[Sequence[int]]:
        tokens = self._tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
        return quality.windows(tokens, context=self._recipe.limits.context)

    def _cut_head(self, model: Model) -> int | None:
        """Let the draft's head compute the recipe's tokens only; how many these are, or None for all."""
        draft = self._recipe.draft
        if model.role != "draft" or draft is None or draft.vocabulary is None:
            return None
        ranges = smaller_head.ranges_of(self._proposed(draft.vocabulary, model.architecture.vocabulary_size))
        path = self._folder / model.graph
        graph = load_graph(path, (self._folder / model.weights).parent)
        if not smaller_head.apply(graph, ranges=ranges).modified:
            return None
        save_sharing_graph(graph, path, self._folder / model.owner / path.name)
        return sum(end - start for start, end in ranges)

    def _proposed(self, below: int, vocabulary_size: int) -> set[int]:
        """Tokens below a number; and those that a text's bytes never make, the ends of sequences among them."""
        special = {*self._tokenizer.tokenizer.get_added_tokens_decoder(), *self._tokenizer.end_tokens}
        tokens = {*range(min(below, vocabulary_size)), *special}
        if outside := [token for token in special if token >= vocabulary_size]:
            raise ExportError(f"token {outside[0]} has no logit among {vocabulary_size}; fetch the checkpoint again")
        return tokens
