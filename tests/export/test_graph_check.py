"""A graph whose declared shapes are not its own is not written, and is found in engine directories of older exports."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result

import forerun
from forerun.cli import main
from forerun.directory import EngineDirectory
from forerun.errors import ExportError
from forerun.manifest import MANIFEST_NAME, Manifest
from forerun_export import graph_check
from forerun_export.build import export
from forerun_export.contrib_operators import schemas
from forerun_export.frontends import Decoder, build_decoder
from forerun_export.graph_files import save_graph, save_sharing_graph
from forerun_export.models import Float32Models
from forerun_export.passes import true_shapes
from forerun_export.passes.graph_tools import CONTRIB, Outcome
from forerun_export.precision import quantize
from forerun_export.recipe import read_recipe
from forerun_export.sources import resolve
from forerun_export.writer import file_records
from helpers.checkpoints import tiny_llama_of_whole_blocks
from helpers.graphs import save

pytestmark = pytest.mark.usefixtures("sampling_graphs_once")

PROMPT = [20, 40, 60, 80]
FORMER_LAYOUT = ("batch", 512, 16)
"""Of a cache [B,H,C,D], as the front end mobius has it."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_of_whole_blocks(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def decoder(llama: Path) -> Decoder:
    return build_decoder(resolve(str(llama)), context=128)


@pytest.fixture(scope="module")
def graphs(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], onnx.ModelProto]:
    """The decoder as written in a precision; a copy, without its weights."""
    written: dict[str, Path] = {}

    def of(precision: str) -> onnx.ModelProto:
        if precision not in written:
            model = decoder.model.clone()
            quantize(model, precision)  # type: ignore[arg-type]
            folder = tmp_path_factory.mktemp(precision)
            written[precision] = save(replace(decoder, model=model), folder)
            (folder / "model.onnx.data").unlink()
        return onnx.load(written[precision], load_external_data=False)

    return of


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    recipe = read_recipe(options={"target": str(llama), "draft": "layers:1", "context": 128, "batch": 2})
    return export(recipe, tmp_path_factory.mktemp("engines") / "tiny").path


@pytest.fixture
def older(engines: Path, tmp_path: Path) -> Path:
    """What exports before this check left: the target's caches go out in the front end's layout, it says."""
    folder = shutil.copytree(engines, tmp_path / "older")
    path = folder / "target" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    for value in model.graph.output[1:]:
        declare(value, FORMER_LAYOUT)
    onnx.save(model, path)
    manifest = Manifest.read(folder / MANIFEST_NAME)
    replace(manifest, files=file_records(folder)).write(folder / MANIFEST_NAME)
    return folder


def declare(value: onnx.ValueInfoProto, shape: Sequence[int | str], element_type: int | None = None) -> None:
    kind = element_type or value.type.tensor_type.elem_type
    value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, shape))


def output_of(model: onnx.ModelProto, kind: str, *, last: bool = False) -> onnx.ValueInfoProto:
    """What is declared of the first or last operator of a kind."""
    names = [node.output[0] for node in model.graph.node if node.op_type == kind]
    declared = {value.name: value for value in (*model.graph.value_info, *model.graph.output)}
    return declared[names[-1 if last else 0]]


def sizes_of(value: onnx.ValueInfoProto) -> list[int | str]:
    return [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


PRECISIONS = ("fp32", "int8", "int4")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_graph_that_was_written_passes_without_its_weights(
    graphs: Callable[[str], onnx.ModelProto], precision: str
) -> None:
    assert graph_check.first_violation(graphs(precision)) == ""


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_cache_goes_out_as_it_comes_in(graphs: Callable[[str], onnx.ModelProto], precision: str) -> None:
    """TensorScatter writes in place: in and out are one buffer."""
    graph = graphs(precision).graph
    given = {value.name: sizes_of(value) for value in graph.input}
    made = {value.name: sizes_of(value) for value in graph.output}
    caches = [name for name in given if "_cache" in name]
    assert len(caches) == 6
    for name in caches:
        assert made[name.replace("_cache", "_cache_out")] == given[name] == ["B", 2, "C", 8]


LIES: dict[str, Callable[[onnx.ModelProto], None]] = {
    "TensorScatter.* differ in rank": lambda model: declare(model.graph.output[1], FORMER_LAYOUT),
    "TensorScatter.* differ in dimension": lambda model: declare(model.graph.output[1], ("B", 2, 512, 9)),
    "Softmax.* differ in rank": lambda model: declare(output_of(model, "Softmax", last=True), ("B", "S")),
    "Sigmoid.* differ in dimension": lambda model: declare(output_of(model, "Sigmoid", last=True), ("B", "S", 95)),
    "elem type": lambda model: declare(model.graph.output[0], ("B", "R", 272), onnx.TensorProto.INT64),
    "'type' .* is required": lambda model: model.graph.output[0].ClearField("type"),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("said", LIES)
def test_a_lie_is_found_and_the_operator_named(
    graphs: Callable[[str], onnx.ModelProto], precision: str, said: str
) -> None:
    """In quantized graphs too, where ONNX by itself says nothing of what comes behind onnxruntime's operators."""
    model = graphs(precision)
    LIES[said](model)
    found = graph_check.first_violation(model)
    assert re.search(said, found), found


def test_a_lie_about_a_computed_size_is_found(graphs: Callable[[str], onnx.ModelProto]) -> None:
    """Only data propagation knows to what shape the zero points of all rows are expanded."""
    model = graphs("int8")
    declare(output_of(model, "Expand"), ("B", "S", 2))
    assert re.search(r"Expand.* differ in dimension", graph_check.first_violation(model))


def test_what_onnxruntime_s_operators_read_is_checked(graphs: Callable[[str], onnx.ModelProto]) -> None:
    model = graphs("int4")
    product = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    attributes = [attribute for attribute in product.attribute if attribute.name != "N"]
    del product.attribute[:]
    product.attribute.extend(attributes)
    assert re.search(r"'N' is missing.* OpType: MatMulNBits", graph_check.first_violation(model))


def test_an_operator_of_which_nothing_is_known_is_named(graphs: Callable[[str], onnx.ModelProto]) -> None:
    model = graphs("int4")
    next(node for node in model.graph.node if node.op_type == "MatMulNBits").op_type = "MatMulUnheard"
    assert "No Op registered for MatMulUnheard" in graph_check.first_violation(model)


def test_onnx_forgets_the_operators_again() -> None:
    for _ in range(2):
        with schemas():
            assert onnx.defs.has("MatMulNBits", CONTRIB)
            assert onnx.defs.has("MatMulIntegerToFloat", CONTRIB)
        assert not onnx.defs.has("MatMulNBits", CONTRIB)
        assert not onnx.defs.has("MatMulIntegerToFloat", CONTRIB)


def test_a_graph_that_contradicts_itself_is_not_written(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder.model.clone()
    model.graph.outputs[1].shape = ir.Shape(FORMER_LAYOUT)
    owner = save(decoder, tmp_path / "owner")
    monkeypatch.setattr(true_shapes, "apply", lambda model: Outcome(False, "left as declared"))
    folder = tmp_path / "target"
    folder.mkdir()
    with pytest.raises(
        ExportError, match=r"^the graph target/model\.onnx contradicts itself: .*TensorScatter"
    ) as caught:
        save_graph(model, folder / "model.onnx", folder / "model.onnx.data")
    assert "\n" not in str(caught.value)
    with pytest.raises(ExportError, match=r"target/draft\.onnx contradicts itself"):
        save_sharing_graph(model, folder / "draft.onnx", owner)
    assert list(folder.iterdir()) == []


def test_an_export_whose_graph_is_not_what_its_manifest_says_leaves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Float32Models, "compare", lambda self, models: {})  # takes time
    monkeypatch.setattr(graph_check, "in_directory", lambda engines: ["target/model.onnx: output logits is missing"])
    with pytest.raises(ExportError, match=r"^target/model\.onnx: output logits is missing; use another"):
        export(read_recipe(options={"target": str(llama), "context": 128}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_all_graphs_of_an_engine_directory_pass(engines: Path) -> None:
    assert graph_check.in_directory(EngineDirectory.open(engines)) == []
    assert "every file and graph is as exported" in run("inspect", engines, "--verify").stdout
    assert "shapes" not in run("inspect", engines, "--verify").stdout


def test_sampling_graphs_are_looked_at_too(engines: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(engines, tmp_path / "engines")
    path = folder / "sampling" / "law.onnx"
    model = onnx.load(path)
    declare(model.graph.output[0], ("B", "R"))
    onnx.save(model, path)
    manifest = replace(Manifest.read(folder / MANIFEST_NAME), files=file_records(folder))
    manifest.write(folder / MANIFEST_NAME)
    (found,) = graph_check.in_directory(EngineDirectory.open(folder))
    assert re.match(r"sampling/law\.onnx: .*differ in rank", found)


def test_inspect_tells_of_an_older_export_in_one_line_and_it_still_decodes(older: Path, engines: Path) -> None:
    result = run("inspect", older, "--verify")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {older}: target/model.onnx: output k_cache_out.0 is ")
    assert "float [batch,512,16], expected float [B,2,C,8] (and 6 more); export again" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert json.loads(run("inspect", older, "--verify", "--json").stdout)["shapes_checked"] is True
    assert run("inspect", older).exit_code == 0
    texts = []
    for path in (older, engines):
        with forerun.open(path) as decoder:
            texts.append(decoder.generate(PROMPT, max_new_tokens=12, draft_length=3).token_ids)
    assert texts[0] == texts[1]


def test_without_the_exporter_inspect_says_what_it_did_not_check(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "forerun_export", None)
    result = run("inspect", older, "--verify")
    assert result.exit_code == 0, result.stderr
    assert "shapes    not checked (needs forerun[export])" in result.stdout
    told = json.loads(run("inspect", older, "--verify", "--json").stdout)
    assert (told["violations"], told["shapes_checked"]) == ([], False)
