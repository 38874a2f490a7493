"""Every tested architecture through Optimum has its checkpoint's logits and decodes the same with drafts as without."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import forerun
from forerun_export import row_check
from forerun_export.architectures import ARCHITECTURES, KnownArchitecture, table
from forerun_export.build import export
from forerun_export.frontends import build_decoder
from forerun_export.graph_files import load_graph, save_graph
from forerun_export.graph_runner import GraphRunner
from forerun_export.parity import ROUNDING_MULTIPLE
from forerun_export.precision import products, quantize
from forerun_export.recipe import Precision, read_recipe
from forerun_export.sources import Source, resolve
from helpers.graphs import save
from helpers.traced_checkpoints import MAKERS, TINY, VARIANTS
from helpers.true_shapes import assert_shapes_are_true

CONTEXT = 128
PROMPTS = ([20, 40, 60, 80, 100, 120, 140, 160, 180, 200, 220], [31, 32, 31, 32, 31, 32], [7])
README = Path(__file__).parents[2] / "README.md"


@dataclass(frozen=True)
class Exported:
    """The engine directory of one checkpoint, made once in a session."""

    name: str
    source: Source
    manifest: forerun.manifest.Manifest
    path: Path

    @property
    def graph(self) -> Path:
        return self.path / self.manifest.target.graph


@pytest.fixture(scope="session")
def exported(sampling_graphs_once: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    done: dict[str, Exported] = {}

    def of(name: str) -> Exported:
        if name not in done:
            folder = tmp_path_factory.mktemp("traced")
            source = MAKERS[name](folder / "checkpoint")
            options = {"target": str(source), "frontend": "optimum", "context": CONTEXT, "batch": 3}
            result = export(read_recipe(options=options), folder / "engines")
            done[name] = Exported(name, resolve(str(source)), result.manifest, result.path)
        return done[name]

    return of


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest, exported: Callable[[str], Exported]) -> Exported:
    return exported(request.param)


def test_the_registry_has_a_checkpoint_of_each_architecture_and_no_other() -> None:
    assert {row.model_type for row in ARCHITECTURES} == set(TINY)
    assert {kind for kind, _ in VARIANTS.values()} <= set(TINY)
    assert set(TINY) <= set(MAKERS), "every test below runs for all of MAKERS"


def test_the_readme_shows_the_registry_s_table() -> None:
    assert table() in README.read_text("utf-8"), "run: python -m forerun_export.architectures"


def test_prefill_decoding_ragged_batch_and_tree_agree_with_pytorch(model: Exported) -> None:
    found = model.manifest.target.parity
    assert found is not None
    assert found.max_error <= found.bound
    assert found.cases >= 22, "three ways for each prompt alone, the batch, the tree"
    assert model.manifest.target.frontend == "optimum"


def test_the_error_is_what_the_table_says(model: Exported) -> None:
    found = model.manifest.target.parity
    assert found is not None
    recorded = {row.model_type: row.error for row in ARCHITECTURES}
    if model.name in recorded:  # another machine rounds otherwise, and not twice as much
        assert found.max_error / (found.bound / ROUNDING_MULTIPLE) <= 2 * recorded[model.name]


def test_every_value_has_the_shape_that_the_graph_declares(model: Exported) -> None:
    assert_shapes_are_true(model.graph)


@pytest.mark.parametrize("controls", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "coupled"])
def test_speculation_gives_the_tokens_of_plain_decoding_alone_and_in_a_batch(
    model: Exported, controls: dict[str, float]
) -> None:
    options = {**controls, "max_new_tokens": 24}
    with forerun.open(model.path) as decoder:
        plain = [decoder.generate(prompt, draft="none", **options).token_ids for prompt in PROMPTS]
        drafted = decoder.generate(list(PROMPTS), draft="ngram", draft_length=4, **options)
    assert [text.token_ids for text in drafted] == plain
    assert sum(text.stats.proposed for text in drafted) > 0


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("name", TINY)
def test_quantized_rows_do_not_depend_on_the_call_and_shapes_are_as_declared(
    name: str, precision: Precision, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    model = exported(name)
    graph = load_graph(model.graph, model.graph.parent)
    quantize(graph, precision)
    assert set(products(graph)) >= {precision}
    save_graph(graph, tmp_path / "model.onnx", tmp_path / "model.onnx.data")
    row_check.check(GraphRunner(tmp_path / "model.onnx"), precision=precision)
    assert_shapes_are_true(tmp_path / "model.onnx")


@pytest.mark.parametrize("row", [row for row in ARCHITECTURES if "mobius" in row.frontends], ids=lambda row: row.name)
def test_both_front_ends_give_the_same_logits_and_tell_their_shapes(
    row: KnownArchitecture, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    traced = exported(row.model_type)
    built = save(build_decoder(traced.source, context=CONTEXT, frontend="mobius"), tmp_path)
    assert_shapes_are_true(built)
    tokens = [list(range(5, 60)), list(range(60, 5, -1))]
    logits = []
    for graph in (built, traced.graph):
        runner = GraphRunner(graph)
        caches = runner.new_caches(2, 64)
        logits.append(runner.run(caches, tokens, [0, 0]))
    parity = traced.manifest.target.parity
    assert parity is not None
    assert np.abs(logits[0] - logits[1]).max() <= 2 * parity.bound
