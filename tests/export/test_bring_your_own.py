"""A folder that Optimum exported is a source: without PyTorch, held to its own graph, and inspected before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result

import forerun
from forerun.cli import main
from forerun.errors import ExportError
from forerun_export import parity
from forerun_export.build import ExportResult, export
from forerun_export.frontends import build_decoder
from forerun_export.recipe import read_recipe
from forerun_export.sources import resolve
from helpers.graphs import save, with_weight
from helpers.traced_checkpoints import tiny
from helpers.traced_graphs import export_folder, first, insert

LIMITS = {"context": 128, "batch": 3}
PROMPT = [20, 40, 60, 80]

# Imports fail as they do where the packages are not installed.
WITHOUT_PYTORCH = """
import sys
for name in ("torch", "transformers", "mobius", "optimum"):
    sys.modules[name] = None
from forerun.cli import main
main()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With Optimum's default attention (sdpa), and a tokenizer."""
    return export_folder(checkpoint, tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="module")
def engines(sampling_graphs_once: None, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    options = {"target": str(folder), "draft": "layers:1", **LIMITS}
    return export(read_recipe(options=options), tmp_path_factory.mktemp("engines") / "tiny")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def changed(folder: Path, out: Path, **values: object) -> Path:
    """A copy of the folder with other values in its config.json."""
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (out / "config.json").write_text(json.dumps({**config, **values}), "utf-8")
    return out


def test_target_and_a_draft_of_its_layers_are_held_to_the_graph_as_it_was_given(engines: ExportResult) -> None:
    manifest = engines.manifest
    assert manifest.draft is not None
    for record in (manifest.target, manifest.draft):
        assert record.frontend == "optimum"
        assert record.parity is not None
        assert record.parity.reference.startswith("model.onnx as given")
        assert 0 < record.parity.max_error <= record.parity.bound < 1e-3
    assert manifest.draft.layers_left_out == (1,)


def test_speculation_changes_nothing(engines: ExportResult) -> None:
    with forerun.open(engines.path) as decoder:
        plain = decoder.generate(PROMPT, draft="none", max_new_tokens=24)
        drafted = decoder.generate(PROMPT, draft="model", draft_length=4, max_new_tokens=24)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.proposed > 0


def test_it_computes_what_the_checkpoint_does(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    graph = save(build_decoder(resolve(str(folder)), context=128), tmp_path)
    assert parity.compare(graph, resolve(str(checkpoint)), context=128).max_error < 1e-3


def test_a_wrong_graph_is_refused(folder: Path, tmp_path: Path) -> None:
    source = resolve(str(folder))
    decoder = with_weight(build_decoder(source, context=128), "layers.2.mlp.down_proj", lambda weights: weights * 1.001)
    with pytest.raises(ExportError, match="does not compute what its checkpoint does"):
        parity.compare(save(decoder, tmp_path), source, context=128)


def test_neither_pytorch_nor_a_builder_is_needed(folder: Path, tmp_path: Path) -> None:
    arguments = ["export", "--target", folder, "--out", tmp_path / "out", "--context", 64, "--json"]
    command = [sys.executable, "-c", WITHOUT_PYTORCH, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["built"] is True


def test_the_graph_itself_may_be_named(folder: Path) -> None:
    assert resolve(str(folder / "model.onnx")).kind == resolve(str(folder)).kind == "onnx"
    assert resolve(str(folder / "model.onnx")).sha256() == resolve(str(folder)).sha256()


def test_another_graph_is_another_source(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path)
    model = ir.load(other / "model.onnx")
    model.producer_name = "another"
    ir.save(model, other / "model.onnx")
    assert resolve(str(other)).sha256() != resolve(str(folder)).sha256()


def test_a_checkpoint_beside_its_graph_counts_as_a_checkpoint(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    changed(folder, tmp_path)
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    assert resolve(str(tmp_path)).kind == "folder"


def test_a_cap_that_the_exported_attention_left_out_is_refused(folder: Path, tmp_path: Path) -> None:
    source = resolve(str(changed(folder, tmp_path, attn_logit_softcapping=50.0)))
    with pytest.raises(ExportError, match="export it with attn_implementation eager"):
        build_decoder(source, context=128)


def test_missing_weights_of_a_graph_are_named(folder: Path, tmp_path: Path) -> None:
    changed(folder, tmp_path)
    ir.save(ir.load(folder / "model.onnx"), tmp_path / "model.onnx", external_data="model.onnx_data")
    (tmp_path / "model.onnx_data").unlink()
    with pytest.raises(ExportError, match=r"model\.onnx cannot be read: .*model\.onnx_data"):
        build_decoder(resolve(str(tmp_path)), context=128)


def test_a_configuration_without_its_numbers_is_told(folder: Path, tmp_path: Path) -> None:
    source = resolve(str(changed(folder, tmp_path, num_hidden_layers=None)))
    with pytest.raises(ExportError, match="none of num_hidden_layers"):
        build_decoder(source, context=128)


def test_inspecting_tells_each_kind_of_layer(folder: Path) -> None:
    result = run("inspect", folder / "model.onnx")
    assert result.exit_code == 0, result.output
    assert "can be converted" in result.output
    assert "layers 0 to 2: 8 query heads over 4 KV heads of 8, scale 0.3536" in result.output
    assert json.loads(run("inspect", folder / "model.onnx", "--json").output)["convertible"] is True


def test_inspecting_lists_every_layer_in_the_way(folder: Path, tmp_path: Path) -> None:
    model = ir.load(folder / "model.onnx")
    for layer in (0, 2):
        softmax = first(model, "Softmax", where=lambda node, layer=layer: f"layers.{layer}" in str(node.name))
        insert(model, softmax, 0, "Sigmoid")
    ir.save(model, tmp_path / "model.onnx")
    result = run("inspect", tmp_path / "model.onnx")
    assert result.exit_code == 1
    assert "cannot be converted as it is" in result.output
    assert [number for number in range(3) if f"in the way: attention layer {number}" in result.output] == [0, 2]


def test_inspecting_a_graph_that_is_no_decoder_tells_what_it_has(tmp_path: Path) -> None:
    value = ir.Value(name="x", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.Node("", "Relu", [value])
    node.outputs[0].name, node.outputs[0].type = "y", value.type
    graph = ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 18}, name="g")
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx")
    result = run("inspect", tmp_path / "model.onnx", "--json")
    assert result.exit_code == 1
    assert "no growing caches" in json.loads(result.output)["obstacles"][0]


def test_inspecting_what_is_no_graph_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    result = run("inspect", tmp_path / "model.onnx")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "cannot be read" in result.stderr
