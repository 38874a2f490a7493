"""The other libraries on a tiny checkpoint: they decode what they decode alone, and their rounds add up."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.directory import EngineDirectory
from forerun.errors import ExportError
from forerun.manifest import Manifest
from forerun_export.bench import Choice, Settings, bench
from forerun_export.bench.engines import line_up
from forerun_export.bench.optimum_system import exported
from forerun_export.bench.processes import Worker, WorkerSpec
from forerun_export.bench.prompts import BenchPrompt
from forerun_export.bench.runs import Output, Task
from forerun_export.bench.torch_system import TorchSystem, without_layers
from forerun_export.build import export
from forerun_export.eager import load_eager
from forerun_export.recipe import read_recipe
from forerun_export.sources import resolve
from helpers.checkpoints import tiny_llama, tiny_qwen2

pytestmark = pytest.mark.usefixtures("sampling_graphs_once")

TASK = Task(tokens=(20, 40, 60, 80), max_new_tokens=12)
SAMPLED = Task(tokens=TASK.tokens, max_new_tokens=12, temperature=1.0, seed=3)
COMMON: dict[str, Any] = {"threads": 1, "end_tokens": []}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(llama: Path) -> TorchSystem:
    return TorchSystem(str(llama), **COMMON)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    options = {"target": str(llama), "draft": "layers:1", "context": 64, "batch": 2, "draft_length": 4}
    return export(read_recipe(options=options), tmp_path_factory.mktemp("engines") / "tiny").path


def expected(llama: Path) -> tuple[int, ...]:
    """Greedy decoding by hand, one whole pass a token."""
    model, tokens = load_eager(resolve(str(llama))), list(TASK.tokens)
    with torch.no_grad():
        for _ in range(TASK.max_new_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(TASK.tokens) :])


def check_rounds(output: Output) -> None:
    assert sum(one.tokens for one in output.rounds) == len(output.tokens) == TASK.max_new_tokens
    assert [one.at_s for one in output.rounds] == sorted(one.at_s for one in output.rounds)


def test_pytorch_decodes_a_token_a_round(llama: Path, plain: TorchSystem) -> None:
    found = plain.decode(TASK)
    assert found.tokens == expected(llama)
    assert [one.tokens for one in found.rounds] == [1] * TASK.max_new_tokens
    check_rounds(found)


@pytest.mark.parametrize("draft", ["layers", "checkpoint"])
def test_assisted_generation_gives_the_same_tokens_in_fewer_rounds(
    llama: Path, plain: TorchSystem, tmp_path: Path, draft: str
) -> None:
    more = {"left_out": [1]} if draft == "layers" else {"assistant": str(tiny_llama(tmp_path / "same"))}
    found = TorchSystem(str(llama), **COMMON, **more).decode(TASK)
    assert found.tokens == plain.decode(TASK).tokens
    check_rounds(found)
    if draft == "checkpoint":  # the same weights again: what it proposes is kept, one token a round at the least
        assert len(found.rounds) <= TASK.max_new_tokens / 2


def test_a_model_without_layers_shares_the_weights_of_the_others(llama: Path) -> None:
    model = load_eager(resolve(str(llama)))
    smaller = without_layers(model, [1])
    layers, kept = model.get_decoder().layers, smaller.get_decoder().layers
    assert len(kept) == smaller.config.num_hidden_layers == len(layers) - 1 == 2
    for before, after in ((0, 0), (2, 1)):
        ours, theirs = (dict(each.named_parameters()) for each in (kept[after], layers[before]))
        assert all(ours[name] is theirs[name] for name in theirs)
    ids = torch.tensor([TASK.tokens])
    with torch.no_grad():
        cached = smaller(ids, use_cache=True).logits
        model.get_decoder().layers = torch.nn.ModuleList([layers[0], layers[2]])
        assert torch.allclose(cached, model(ids, use_cache=False).logits, atol=1e-5)


def test_an_assistant_of_layers_fits_models_that_list_their_layers(tmp_path: Path) -> None:
    checkpoint = str(tiny_qwen2(tmp_path / "qwen2"))
    found = TorchSystem(checkpoint, **COMMON, left_out=[1]).decode(TASK)
    assert found.tokens == TorchSystem(checkpoint, **COMMON).decode(TASK).tokens


def test_sampling_takes_the_seed_and_the_whole_vocabulary(plain: TorchSystem) -> None:
    again = Task(tokens=TASK.tokens, max_new_tokens=12, temperature=1.0, seed=4)
    assert plain.decode(SAMPLED).tokens == plain.decode(SAMPLED).tokens != plain.decode(again).tokens


def test_generation_ends_at_the_engine_directorys_end_tokens(llama: Path, plain: TorchSystem) -> None:
    tokens = plain.decode(TASK).tokens
    found = TorchSystem(str(llama), threads=1, end_tokens=[tokens[3]]).decode(TASK)
    assert found.tokens == tokens[: tokens.index(tokens[3]) + 1]


def test_optimum_exports_once_and_decodes_the_same(
    llama: Path, plain: TorchSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # In a process of its own, as always: its sessions bring their own threads, where forerun's share one pool.
    with Worker(WorkerSpec("optimum", "optimum", {"checkpoint": str(llama), **COMMON}), threads=1) as worker:
        worker.load()
        found = worker.decode(TASK)
    assert found.tokens == plain.decode(TASK).tokens
    check_rounds(found)
    folder = exported(str(llama))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    before = (folder / "model.onnx").stat().st_mtime_ns
    assert (exported(str(llama)) / "model.onnx").stat().st_mtime_ns == before


def test_a_failing_export_of_optimum_is_one_line(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ExportError, match=r"^optimum cannot export .*: cannot write .*; leave this baseline out$"):
        exported(str(llama))


def test_a_package_that_is_missing_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hidden = tmp_path / "optimum"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('gone', name='optimum')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    spec = WorkerSpec("optimum", "optimum", {"checkpoint": "x", **COMMON})
    with Worker(spec, threads=1) as worker, pytest.raises(Exception, match=r"package optimum.*'forerun\[bench\]'"):
        worker.load()


def test_a_whole_benchmark_with_other_libraries(engines: Path) -> None:
    choice = Choice(baselines=("torch", "torch-assisted"))
    prompts = [BenchPrompt("a", "one two"), BenchPrompt("b", "three")]
    found = bench(engines, prompts, settings=Settings(max_new_tokens=10), choice=choice)
    assert found.failed == {}
    agreed = {name: one.lossless for (category, name), one in found.summaries.items() if category == "all"}
    assert agreed["torch"].as_forerun_plain == agreed["torch"].texts == 2
    assert (agreed["torch-assisted"].status, agreed["torch-assisted"].equal) == ("equal", 2)
    assert found.summaries["all", "forerun-model"].speed_ups.keys() == {"forerun-plain", "torch"}


def test_a_moved_checkpoint_is_given_by_option_and_another_one_is_noted(
    engines: Path, llama: Path, tmp_path: Path
) -> None:
    manifest = Manifest.read(engines / "manifest.json")
    directory = EngineDirectory.open(engines)
    moved = tiny_llama(tmp_path / "moved")
    other = tiny_llama(tmp_path / "other", seed=1)
    notes = {}
    for place in (moved, other):
        choice = Choice(baselines=("torch",), checkpoint=str(place))
        line = line_up(directory, choice, threads=1, available_bytes=None)
        assert line.unavailable == {}
        assert line.workers[-1].arguments["checkpoint"] == str(place)
        notes[place] = list(line.notes)
    assert notes[moved] == []
    assert "SHA-256" in notes[other][0]
    assert manifest.target.precision == "fp32"
    assert line.engines[0].label == "PyTorch eager (fp32)"
