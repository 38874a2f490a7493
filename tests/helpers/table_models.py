"""Engine directories of lookup-table language models: real graphs and caches, built in milliseconds.

    code(context) = sum over tokens of token_weights[token] * position_weights[position], modulo the table's height
    logits        = table[code]

The sum is read back from the caches, so a slot that is stale, missing or misplaced changes what is generated.
"""

import functools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import tokenizers
from onnxscript import BOOL, FLOAT, INT64, script
from onnxscript.onnx_opset import opset24 as op
from onnxscript.values import Opset

import forerun
from forerun.manifest import (
    MANIFEST_NAME,
    Architecture,
    BackendRecord,
    Limits,
    Manifest,
    ModelRecord,
    TokenizerRecord,
)
from forerun.tokenizer import vocabulary_sha256
from forerun_export.sampling import save_sampling_graphs
from forerun_export.writer import file_records
from helpers.small_tokenizers import lookup_words

HEADS, HEAD_SIZE = 2, 2
HIDDEN_SIZE = 4
CONTEXT, BATCH, DRAFT_LENGTH = 64, 8, 8
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SURE = 10.0
"""A logit that makes its token certain for all practical purposes, where the others are 0."""

B, S, R, C, M, V, P = "B", "S", "R", "C", "M", "V", "P"  # names of symbolic dimensions


@script(Opset("tests.table_models", 1), default_opset=op)
def table_decoder(
    input_ids: INT64[B, S],
    position_ids: INT64[B, S],
    write_indices: INT64[B],
    tree_mask: BOOL[B, S, S],
    logit_rows: INT64[B, R],
    k_cache: FLOAT[B, 2, C, 2],
    v_cache: FLOAT[B, 2, C, 2],
    table: FLOAT[M, V],
    token_weights: FLOAT[V],
    position_weights: FLOAT[P],
) -> tuple[FLOAT[B, R, V], FLOAT[B, 2, C, 2], FLOAT[B, 2, C, 2]]:
    """The decoder contract. Each head's place has a factor of its own; their products add up to 1."""
    k_factors = op.Constant(value_floats=[1.0, 2.0, 3.0, 4.0])
    v_factors = op.Constant(value_floats=[2.0, -3.0, -1.0, 2.0])
    k = op.Unsqueeze(op.Gather(token_weights, input_ids), [1, 3]) * op.Reshape(k_factors, [1, 2, 1, 2])
    v = op.Unsqueeze(op.Gather(position_weights, position_ids), [1, 3]) * op.Reshape(v_factors, [1, 2, 1, 2])
    k_cache_out = op.TensorScatter(k_cache, k, write_indices, axis=2)
    v_cache_out = op.TensorScatter(v_cache, v, write_indices, axis=2)
    parts = op.Unsqueeze(op.ReduceSum(k_cache_out * v_cache_out, [1, 3], keepdims=0), [1])  # [B,1,C]

    slots = op.Range(0, op.Squeeze(op.Shape(k_cache, start=2, end=3)), 1)
    place = op.Unsqueeze(op.Unsqueeze(slots, [0]) - op.Unsqueeze(write_indices, [1]), [1])  # [B,1,C]
    width = op.Squeeze(op.Shape(input_ids, start=1))
    clipped = op.Expand(op.Clip(place, 0, width - 1), op.Concat([1], op.Shape(input_ids, start=1), [1], axis=0))
    among_new = op.And(op.And(place >= 0, place < width), op.GatherElements(tree_mask, clipped, axis=2))
    visible = op.Or(place < 0, among_new)  # [B,S,C]

    height = op.Shape(table, end=1)
    code = op.Mod(op.Cast(op.ReduceSum(op.Where(visible, parts, 0.0), [2], keepdims=0), to=INT64.dtype), height)
    logits = op.Gather(table, op.GatherElements(code, logit_rows, axis=1))
    return logits, k_cache_out, v_cache_out


@functools.cache
def _table_decoder_proto() -> object:
    return table_decoder.to_model_proto()


@dataclass(frozen=True, eq=False)
class TableModel:
    """table float32 [M,V], token_weights float32 [V], position_weights float32 [positions]."""

    table: np.ndarray
    token_weights: np.ndarray
    position_weights: np.ndarray

    @property
    def vocabulary_size(self) -> int:
        return int(self.table.shape[1])

    def logits(self, context: Sequence[int]) -> list[float]:
        """What the graph gives after these tokens."""
        weights = self.token_weights[list(context)] * self.position_weights[: len(context)]
        logits: list[float] = self.table[int(weights.sum()) % len(self.table)].tolist()
        return logits

    def save(self, folder: Path, *, keeps_features: bool = False) -> None:
        """Write model.onnx and model.onnx.data; `keeps_features` for the target of a head."""
        from helpers.table_heads import keep_features

        model = onnx_ir.from_proto(_table_decoder_proto())
        if keeps_features:
            keep_features(model)
        save_table_graph(model, self, folder)


def save_table_graph(model: onnx_ir.Model, tables: TableModel, folder: Path) -> None:
    """Write a graph whose last inputs are these tables."""
    folder.mkdir()
    graph, constants = model.graph, {"table", "token_weights", "position_weights"}
    for value in [value for value in graph.inputs if value.name in constants]:
        value.const_value = onnx_ir.tensor(getattr(tables, value.name), name=value.name)
        value.shape = value.const_value.shape
        graph.inputs.remove(value)
        graph.initializers.add(value)
    graph.outputs[0].shape = onnx_ir.Shape(["B", "R", tables.vocabulary_size])
    for value in (*graph.inputs, *graph.outputs):
        if value.name.startswith(("k_cache", "v_cache")):
            value.name += ".0"
    model.ir_version = 11
    onnx_ir.save(model, folder / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=12)


def random_model(seed: int, *, vocabulary: int = 8, context: int = CONTEXT, spread: float = 1.5) -> TableModel:
    """A law that depends on every token of the context and on its place."""
    height = 251 if vocabulary < 250 else 1009  # a prime above all token weights: changing one changes the code
    table = np.random.default_rng(seed).normal(scale=spread, size=(height, vocabulary))
    return TableModel(
        table.astype(np.float32),
        np.arange(1, vocabulary + 1, dtype=np.float32),
        np.arange(1, context + 1, dtype=np.float32),
    )


def blurred(model: TableModel, seed: int, *, spread: float = 0.7) -> TableModel:
    """A model that mostly agrees with another."""
    noise = np.random.default_rng(seed).normal(scale=spread, size=model.table.shape)
    return TableModel((model.table + noise).astype(np.float32), model.token_weights, model.position_weights)


def contrary(model: TableModel) -> TableModel:
    """A model whose most likely token is never the other's."""
    return TableModel(np.roll(model.table, 1, axis=1), model.token_weights, model.position_weights)


def scripted(tokens: Mapping[int, int], *, vocabulary: int, context: int = CONTEXT) -> TableModel:
    """A model that says token tokens[n] after a context of n tokens, whatever they are, and 0 where none is set."""
    table = np.zeros((context + 1, vocabulary), np.float32)
    table[:, 0] = SURE / 2
    for length, token in tokens.items():
        table[length, token] = SURE
    return TableModel(table, np.ones(vocabulary, np.float32), np.ones(context, np.float32))


DRAFTS: Mapping[str, Callable[[TableModel], TableModel]] = {
    "good": lambda target: blurred(target, seed=101),
    "equal": lambda target: target,
    "contrary": contrary,
}


@dataclass(frozen=True)
class TablePair:
    """An engine directory and the models in it."""

    path: Path
    target: TableModel
    draft: TableModel

    def open(self) -> forerun.Decoder:
        """Open the directory."""
        return forerun.open(self.path)


def table_pair(
    folder: Path,
    *,
    draft: str = "good",
    seed: int = 1,
    vocabulary: int = 8,
    context: int = CONTEXT,
    head: bool = False,
    **options: Any,
) -> TablePair:
    """A random target with one of DRAFTS, which may be a head; `options` are those of `engine_directory`."""
    from helpers.table_heads import head_of

    target = random_model(seed, vocabulary=vocabulary, context=context)
    drafts = head_of(DRAFTS[draft](target)) if head else DRAFTS[draft](target)
    return TablePair(engine_directory(folder, target, drafts, **options), target, drafts)


def script_after(prompt_tokens: int, tokens: Sequence[int], *, wrong_at: Sequence[int] = ()) -> dict[int, int]:
    """The script of `tokens` behind a prompt; at the places `wrong_at` it says another token (1, or 2 for a 1)."""
    said = [(1 if token != 1 else 2) if place in wrong_at else token for place, token in enumerate(tokens)]
    return {prompt_tokens + place: token for place, token in enumerate(said)}


def byte_tokens(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Tokens of a text in a byte-level vocabulary, one a byte: what is not ASCII is cut apart."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))
    return [tokenizer.token_to_id(byte) for byte in spelled]


def words(count: int) -> tokenizers.Tokenizer:
    """Tokens w0, w1, ..: text is their names with spaces between."""
    return lookup_words([f"w{token}" for token in range(count)])


def engine_directory(
    folder: Path,
    target: TableModel,
    draft: TableModel | None = None,
    *,
    tokenizer: tokenizers.Tokenizer | None = None,
    end_tokens: Sequence[int] = (),
    batch: int = BATCH,
    draft_length: int = DRAFT_LENGTH,
    sampling: Path | None = None,
) -> Path:
    """An engine directory of these models; its context is the number of positions that the target knows.

    `sampling` is a folder of sampling graphs to use in place of the exporter's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or words(target.vocabulary_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _link_files(sampling or sampling_graphs(target.vocabulary_size), folder / "sampling")
    vocabulary = vocabulary_sha256(tokenizer)
    models = {"target": target, "draft": draft}
    has_head = isinstance(draft, _head_type())
    records = {name: _save(model, folder, name, vocabulary, has_head) for name, model in models.items() if model}
    manifest = Manifest(
        schema=1,
        forerun="0.1.0",
        recipe_sha256="0" * 64,
        target=records["target"],
        draft=records.get("draft"),
        sampling={file.stem: f"sampling/{file.name}" for file in (folder / "sampling").iterdir()},
        tokenizer=TokenizerRecord(vocabulary, tuple(end_tokens), None, None),
        limits=Limits(batch, len(target.position_weights), draft_length),
        backend=BackendRecord("onnxruntime", "cpu", {}),
        files=file_records(folder),
    )
    manifest.write(folder / MANIFEST_NAME)
    return folder


@functools.cache
def sampling_graphs(vocabulary: int) -> Path:
    """A folder with the exporter's sampling graphs for this many tokens; made once in a process."""
    folder = Path(_temporary_folder().name, str(vocabulary))
    folder.mkdir()
    save_sampling_graphs(folder, vocabulary)
    return folder


@functools.cache
def _temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="forerun-tests-")  # removed when the process ends


def _link_files(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        os.link(file, target / file.name)


def _head_type() -> type[TableModel]:
    from helpers.table_heads import TableHead

    return TableHead


def _save(model: TableModel, folder: Path, name: str, vocabulary: str, has_head: bool) -> ModelRecord:
    model.save(folder / name, keeps_features=has_head and name == "target")
    architecture = Architecture(
        "table", 1, HEADS, HEADS, HEAD_SIZE, HIDDEN_SIZE, model.vocabulary_size, len(model.position_weights)
    )
    return ModelRecord(
        graph=f"{name}/model.onnx",
        weights=f"{name}/model.onnx.data",
        source="table",
        source_sha256="0" * 64,
        architecture=architecture,
        precision="fp32",
        frontend="none",
        layers_left_out=(),
        vocabulary_sha256=vocabulary,
        parity=None,
        feature_layers=(1, 1, 1) if has_head and name == "draft" else (),
    )
