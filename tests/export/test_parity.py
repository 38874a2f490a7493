"""The built graph computes what the checkpoint does, to float32 rounding, and a graph that does not is refused."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from forerun.errors import ExportError
from forerun_export import parity
from forerun_export.frontends import Decoder, build_decoder
from forerun_export.graph_files import save_sharing_graph
from forerun_export.graph_runner import GraphRunner
from forerun_export.reference import Reference
from forerun_export.sources import resolve
from helpers.checkpoints import VOCABULARY_SIZE, tiny_gguf, tiny_llama, tiny_qwen2
from helpers.graphs import Array, save, with_weight

CONTEXT = 256
LEFT_OUT = (1,)
CHECKPOINTS: Mapping[str, Callable[[Path], Path]] = {
    "llama, grouped heads": tiny_llama,
    "llama, tied head": partial(tiny_llama, tied=True),
    "llama, as many KV heads": partial(tiny_llama, kv_heads=6),
    "llama, one KV head": partial(tiny_llama, kv_heads=1),
    "qwen2, biases and tied head": tiny_qwen2,
    "llama in a GGUF file": tiny_gguf,
}


class Built:
    """A checkpoint, its decoder, its saved graph and its references."""

    def __init__(self, folder: Path, make: Callable[[Path], Path]) -> None:
        self.source = resolve(str(make(folder / "checkpoint")))
        self.decoder = build_decoder(self.source, context=CONTEXT)
        self.graph = save(self.decoder, folder / "target")
        self.references: Mapping[tuple[int, ...], Reference] = parity.references(
            self.source, VOCABULARY_SIZE, context=CONTEXT, texts=[[5, 6, 7, 8] * 8], variants=[(), LEFT_OUT]
        )


@pytest.fixture(scope="module", params=CHECKPOINTS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    (folder := tmp_path_factory.mktemp("checkpoint") / "checkpoint").mkdir()
    return Built(folder.parent, CHECKPOINTS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("llama"), tiny_llama)


def test_every_way_of_decoding_agrees_with_the_checkpoint(built: Built) -> None:
    found = parity.check(built.graph, built.references[()])
    assert found.max_error <= found.bound
    assert found.cases == 3 * 5 + 5 + 2, "three ways for each prompt alone, the batch, the tree"


def test_the_bound_is_no_wider_than_rounding(built: Built) -> None:
    """The bound scales with what float32 costs PyTorch itself: far below the differences between tokens."""
    reference = built.references[()]
    found = parity.check(built.graph, reference)
    assert found.bound < 1e-4 * max(np.abs(logits).max() for logits in reference.logits)


def test_a_draft_with_layers_left_out_agrees_with_the_checkpoint_without_them(built: Built, tmp_path: Path) -> None:
    draft = built.decoder.without_layers(LEFT_OUT)
    save_sharing_graph(draft.model, tmp_path / "model.onnx", built.graph)
    found = parity.check(tmp_path / "model.onnx", built.references[LEFT_OUT], weights_folder=built.graph.parent)
    assert found.max_error <= found.bound
    assert draft.architecture.layers == built.decoder.architecture.layers - 1


def test_compare_loads_the_checkpoint_itself(llama: Built) -> None:
    assert parity.compare(llama.graph, llama.source, context=CONTEXT).max_error < 1e-4


def swapped_heads(columns: Array) -> Array:
    return np.concatenate([columns[:, 8:16], columns[:, :8], columns[:, 16:]], axis=1)


WRONG: Mapping[str, tuple[str, Callable[[Array], Array]]] = {
    "two query heads swapped": ("layers.1.self_attn.q_proj", swapped_heads),
    "the scale of attention missing": ("forerun.float32.0.35", np.ones_like),
    "positions off by one": ("cos_cache", lambda table: np.roll(table, 1, axis=0)),
    "one layer's weights transposed": ("layers.2.self_attn.o_proj", np.transpose),
    "one layer's weights a thousandth too large": ("layers.2.mlp.down_proj", lambda weights: weights * 1.001),
    "one row of a norm forgotten": (
        "layers.0.input_layernorm",
        lambda weights: np.where(np.arange(48) == 7, 1, weights),
    ),
    "future tokens seen": ("forerun.float32.minus3.4", np.zeros_like),
    "weights that are no numbers": ("layers.0.mlp.down_proj", lambda weights: weights * np.nan),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_graph_is_far_above_the_bound(llama: Built, tmp_path: Path, fault: str) -> None:
    name, change = WRONG[fault]
    graph = save(with_weight(llama.decoder, name, change), tmp_path)
    with pytest.raises(ExportError, match="float32 rounding explains"):
        parity.check(graph, llama.references[()])
    worst = max(rows.error() / rounding(llama, rows.prompt) for rows in all_rows(graph, llama))
    assert worst > 10 * parity.ROUNDING_MULTIPLE


def rounding(built: Built, prompt: int) -> float:
    return built.references[()].rounding[prompt]


def all_rows(graph: Path, built: Built) -> list[parity.Rows]:
    runner = GraphRunner(graph)
    return [rows for way in parity.WAYS.values() for rows in way(runner, built.references[()])]


def test_a_draft_is_not_taken_for_the_whole_model(llama: Built, tmp_path: Path) -> None:
    draft: Decoder = llama.decoder.without_layers(LEFT_OUT)
    with pytest.raises(ExportError, match="does not compute what its checkpoint does"):
        parity.check(save(draft, tmp_path), llama.references[()])


def test_a_graph_that_does_not_load_is_named(tmp_path: Path, llama: Built) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(ExportError, match=r"model\.onnx"):
        parity.check(tmp_path / "model.onnx", llama.references[()])
