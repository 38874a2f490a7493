"""A draft's head over fewer tokens: the same logits for those, none for the others, and exact output all the same."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from forerun.errors import ExportError
from forerun_export.frontends import Decoder, build_decoder
from forerun_export.graph_files import load_graph, save_sharing_graph
from forerun_export.graph_runner import Floats, GraphRunner
from forerun_export.passes import smaller_head
from forerun_export.passes.smaller_head import LOWEST, ranges_of
from forerun_export.precision import quantize
from forerun_export.sources import resolve
from helpers.checkpoints import VOCABULARY_SIZE, tiny_llama, tiny_qwen2
from helpers.graphs import save

TOKENS = [[3, 40, 41, 99, 200, 7], [9, 9, 8, 70, 1, 0]]
RANGES = {"a beginning": [(0, 100)], "an end": [(100, 272)], "pieces": [(0, 50), (52, 53), (260, 272)]}
MODELS: Mapping[str, Callable[[Path], Path]] = {"own head": tiny_llama, "tied head": partial(tiny_qwen2, tied=True)}


@pytest.fixture(
    scope="module", params=[(model, precision) for model in MODELS for precision in ("fp32", "int8", "int4")]
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of a decoder with its whole head."""
    model, precision = request.param
    folder = tmp_path_factory.mktemp("model")
    decoder = build_decoder(resolve(str(MODELS[model](folder / "checkpoint"))), context=64)
    quantize(decoder.model, precision)
    return save(decoder, folder / "whole")


def logits_of(graph: Path, weights_folder: Path) -> Floats:
    runner = GraphRunner(graph, weights_folder=weights_folder)
    return runner.run(runner.new_caches(2, 64), TOKENS, [0, 0], logit_rows=[[5, 0, 2]] * 2)


def cut(whole: Path, ranges: smaller_head.Ranges, folder: Path) -> Path:
    model = load_graph(whole, whole.parent)
    assert smaller_head.apply(model, ranges=ranges).modified
    save_sharing_graph(model, folder / "model.onnx", whole)
    return folder / "model.onnx"


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_kept_tokens_have_the_same_bits_and_the_others_the_lowest(
    tmp_path: Path, whole: Path, ranges: smaller_head.Ranges
) -> None:
    """The weight file stays as it is."""
    expected = logits_of(whole, whole.parent)
    found = logits_of(cut(whole, ranges, tmp_path), whole.parent)
    assert found.shape == (2, 3, VOCABULARY_SIZE)
    kept = np.zeros(VOCABULARY_SIZE, bool)
    for start, end in ranges:
        kept[start:end] = True
    assert np.array_equal(found[..., kept], expected[..., kept])
    assert (found[..., ~kept] == np.float32(LOWEST)).all()


def test_asked_for_all_tokens_it_does_nothing(whole: Path) -> None:
    model = load_graph(whole, whole.parent)
    outcome = smaller_head.apply(model, ranges=[(0, VOCABULARY_SIZE)])
    assert not outcome.modified
    assert "all 272 tokens" in outcome.reason


def test_a_head_with_a_bias_for_each_token_is_refused(tmp_path: Path) -> None:
    decoder: Decoder = build_decoder(resolve(str(tiny_llama(tmp_path / "checkpoint"))), context=64)
    model = decoder.model
    logits = model.graph.outputs[0]
    bias = ir.Value(name="bias", const_value=ir.tensor(np.ones(VOCABULARY_SIZE, np.float32), name="bias"))
    model.graph.register_initializer(bias)
    biased = ir.node("Add", [logits, bias])
    model.graph.append(biased)
    model.graph.outputs[0] = biased.outputs[0]
    logits.name, biased.outputs[0].name = "unbiased", "logits"
    biased.outputs[0].type, biased.outputs[0].shape = logits.type, logits.shape
    with pytest.raises(ExportError, match=r"leave draft\.vocabulary out"):
        smaller_head.apply(model, ranges=[(0, 10)])


@pytest.mark.parametrize(
    ("tokens", "ranges"),
    [
        ([], []),
        ([4], [(4, 5)]),
        (range(10), [(0, 10)]),
        ([9, 2, 1, 7, 8, 2], [(1, 3), (7, 10)]),
    ],
)
def test_ranges_hold_exactly_the_tokens(tokens: list[int], ranges: smaller_head.Ranges) -> None:
    assert ranges_of(tokens) == ranges
