"""A whole export on tiny checkpoints: what it writes, what it refuses, and that it is all or nothing."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from click.testing import CliRunner, Result

import forerun
from forerun.cli import main
from forerun.errors import ExportError
from forerun_export import models, parity, writer
from forerun_export.build import export
from forerun_export.recipe import read_recipe
from forerun_export.sources import resolve
from helpers.checkpoints import tiny_gguf, tiny_llama, tiny_qwen2

pytestmark = pytest.mark.usefixtures("sampling_graphs_once")

LIMITS = {"context": 128, "batch": 4, "draft_length": 5}
PROMPT = [20, 40, 60, 80]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    out = tmp_path_factory.mktemp("engines") / "tiny"
    recipe = read_recipe(options={"target": str(llama), "draft": "layers:1", **LIMITS})
    return export(recipe, out).path


def plain_tokens(engines: Path, **controls: object) -> tuple[int, ...]:
    with forerun.open(engines) as decoder:
        return decoder.generate(PROMPT, max_new_tokens=20, **controls).token_ids


def state_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_pair_with_a_draft_of_its_own_layers_decodes_like_its_target(engines: Path) -> None:
    plain = plain_tokens(engines, draft="none")
    assert plain_tokens(engines) == plain_tokens(engines, draft_length=5) == plain


def test_a_pair_of_two_checkpoints_decodes_like_its_target(tmp_path: Path, llama: Path, engines: Path) -> None:
    draft = tiny_qwen2(tmp_path / "qwen2")
    recipe = read_recipe(options={"target": str(llama), "draft": str(draft), **LIMITS})
    manifest = export(recipe, tmp_path / "pair").manifest
    assert manifest.draft is not None
    assert (manifest.target.architecture.model_type, manifest.draft.architecture.model_type) == (
        "llama",
        "qwen2",
    )
    assert manifest.draft.weights == "draft/model.onnx.data"
    assert plain_tokens(tmp_path / "pair") == plain_tokens(engines, draft="none")


def test_a_target_alone_decodes_plainly(tmp_path: Path, llama: Path, engines: Path) -> None:
    manifest = export(read_recipe(options={"target": str(llama), **LIMITS}), tmp_path / "alone").manifest
    assert manifest.draft is None
    assert plain_tokens(tmp_path / "alone") == plain_tokens(engines, draft="none")
    with forerun.open(tmp_path / "alone") as decoder, pytest.raises(forerun.RequestError, match="draft"):
        decoder.generate(PROMPT, draft="model")


def test_the_manifest_records_sources_parity_and_every_file(engines: Path, llama: Path) -> None:
    manifest = json.loads((engines / "manifest.json").read_text())
    assert manifest["target"]["source"] == str(llama)
    assert manifest["draft"]["layers_left_out"] == [1]
    assert manifest["draft"]["architecture"]["layers"] == 2
    for role in ("target", "draft"):
        assert 0 < manifest[role]["parity"]["max_error"] <= manifest[role]["parity"]["bound"] < 1e-3
    assert set(manifest["files"]) == set(state_of(engines)) - {"manifest.json"}
    assert run("inspect", engines, "--verify").exit_code == 0


def test_a_second_export_does_nothing_unless_forced_or_asked_for_something_else(tmp_path: Path, llama: Path) -> None:
    out, options = tmp_path / "out", {"target": str(llama), **LIMITS}
    assert export(read_recipe(options=options), out).built
    before = (out / "manifest.json").stat().st_ino
    assert not export(read_recipe(options=options), out).built
    assert (out / "manifest.json").stat().st_ino == before
    assert export(read_recipe(options=options), out, force=True).built
    assert export(read_recipe(options={**options, "context": 64}), out).built


def test_a_damaged_engine_directory_is_built_again(tmp_path: Path, llama: Path) -> None:
    recipe = read_recipe(options={"target": str(llama), **LIMITS})
    out = export(recipe, tmp_path / "out").path
    (out / "target" / "model.onnx.data").write_bytes(b"")
    assert export(recipe, out).built
    assert run("inspect", out, "--verify").exit_code == 0


def test_a_draft_of_the_same_size_with_other_tokens_is_refused(tmp_path: Path, llama: Path) -> None:
    draft = tiny_llama(tmp_path / "draft", seed=1)
    other = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    tokenizers.Tokenizer.from_str(json.dumps(other)).save(str(draft / "tokenizer.json"))
    recipe = read_recipe(options={"target": str(llama), "draft": str(draft), **LIMITS})
    with pytest.raises(ExportError, match=r"token maps differ \(272 and 272 tokens\)"):
        export(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layers", ["layers:3", "layers:0,1,2"])
def test_layers_that_do_not_exist_or_all_of_them_are_refused(tmp_path: Path, llama: Path, layers: str) -> None:
    recipe = read_recipe(options={"target": str(llama), "draft": layers, **LIMITS})
    with pytest.raises(ExportError, match="layers"):
        export(recipe, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_does_not_compute_its_checkpoint_is_refused(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = models.save_graph

    def save_with_a_wrong_weight(model: object, *paths: Path, **options: object) -> None:
        saved(model, *paths, **options)  # type: ignore[arg-type]
        weights = np.fromfile(paths[1], np.float32)
        weights[len(weights) // 2 :] *= 1.001
        weights.tofile(paths[1])

    monkeypatch.setattr(models, "save_graph", save_with_a_wrong_weight)
    with pytest.raises(ExportError, match="does not compute what its checkpoint does"):
        export(read_recipe(options={"target": str(llama), **LIMITS}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class Interruption:
    """Raises KeyboardInterrupt at the n-th report of progress, and counts them."""

    def __init__(self, at: int) -> None:
        self.reports = 0
        self._at = at

    def __call__(self, step: str, done: int = 0, total: int = 1) -> None:
        self.reports += 1
        if self.reports == self._at:
            raise KeyboardInterrupt


def test_interrupted_anywhere_the_previous_engines_still_work(tmp_path: Path, llama: Path, engines: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(engines, out)
    before, expected = state_of(out), plain_tokens(engines)
    recipe = read_recipe(options={"target": str(llama), "draft": "layers:2", **LIMITS})
    complete = Interruption(at=0)
    export(recipe, tmp_path / "elsewhere", progress=complete)
    shutil.rmtree(tmp_path / "elsewhere")
    assert complete.reports > 8
    for at in range(1, complete.reports + 1, max(1, complete.reports // 12)):
        with pytest.raises(KeyboardInterrupt):
            export(recipe, out, progress=Interruption(at))
        assert state_of(out) == before
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert plain_tokens(out) == expected


def test_no_room_on_disk_is_told_before_anything_is_written(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    result = run("export", "--target", llama, "--out", tmp_path / "out", "--context", 128)
    assert result.exit_code == 1
    assert "no room on disk" in result.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def corrupt_gguf(folder: Path, damage: str) -> Path:
    path = tiny_gguf(folder)
    content = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "not a GGUF":
            path.write_bytes(b"hello" + content[5:])
        case "cut in its header":
            path.write_bytes(content[:100])
        case "cut in its tensors":
            path.write_bytes(content[:-1000])
        case "empty":
            path.write_bytes(b"")
    return path


@pytest.mark.parametrize("damage", ["missing", "not a GGUF", "cut in its header", "cut in its tensors", "empty"])
def test_a_damaged_gguf_is_one_line_and_leaves_nothing_behind(tmp_path: Path, damage: str) -> None:
    source = corrupt_gguf(tmp_path, damage)
    result = run("export", "--target", source, "--out", tmp_path / "out", "--context", 128)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"Error: {source}")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_truncated_weights_is_named(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    result = run("export", "--target", source, "--out", tmp_path / "out", "--context", 128)
    assert result.exit_code == 1
    assert "model.safetensors is truncated" in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--precision", "int9"], "--precision: expected one of fp32"),
        (["--device", "tpu"], "--device: expected one of cpu"),
        (["--frontend", "magic"], "--frontend: expected one of auto, mobius"),
        (["--draft", "layers:x"], "is not a layer number"),
        (["--context", "0"], "--context: expected at least 1"),
        (["--context", "100000"], "context 100000 is longer than the 512 positions"),
        (["--target", "no/such-model"], "hub"),
    ],
)
def test_a_wrong_export_option_is_one_line(
    tmp_path: Path, llama: Path, options: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run("export", "--target", llama, "--out", tmp_path / "out", *options)
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert says in last
    assert not (tmp_path / "out").exists()


def test_an_unreadable_recipe_names_the_file_and_the_key(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.toml"
    recipe.write_text('[target]\nsource = "x.gguf"\n[limits]\nbatches = 3\n')
    result = run("export", recipe, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "bad.toml" in result.stderr
    assert "batches" in result.stderr


def test_a_destination_with_other_files_is_left_alone(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    result = run("export", "--target", llama, "--out", tmp_path, "--context", 128)
    assert result.exit_code == 1
    assert "left alone" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_comparison_is_with_the_checkpoint_and_not_with_the_graph_itself(llama: Path, engines: Path) -> None:
    other = tiny_llama(engines.parent / "other", seed=9)
    with pytest.raises(ExportError, match="does not compute"):
        parity.compare(engines / "target" / "model.onnx", resolve(str(other)), context=128)
