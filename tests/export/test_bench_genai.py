"""onnxruntime-genai as a contender, against a stand-in for the library: what it is told, and how its calls are counted.

The library itself is no dependency of the tests; that it decodes is seen when it is measured.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from forerun.directory import EngineDirectory
from forerun.errors import ExportError
from forerun_export.bench import Choice, Settings, bench
from forerun_export.bench.engines import PLAIN, line_up
from forerun_export.bench.genai_build import builder_options, model_folder
from forerun_export.bench.processes import Worker, WorkerSpec
from forerun_export.bench.prompts import BenchPrompt
from forerun_export.bench.runs import Task
from helpers.checkpoints import tiny_llama
from helpers.table_models import TablePair, table_pair

GENAI, GENAI_NGRAM = "onnxruntime-genai", "onnxruntime-genai-ngram"
TASK = Task(tokens=(5, 6, 7), max_new_tokens=8)


class FakeConfig:
    def __init__(self, folder: str) -> None:
        self.folder, self.told = folder, {}

    def overlay(self, text: str) -> None:
        self.told = json.loads(text)


class FakeModel:
    def __init__(self, config: FakeConfig) -> None:
        self.config = config


class FakeParameters:
    def __init__(self, model: FakeModel) -> None:
        self.model, self.search, self.speculative = model, {}, {}

    def set_search_options(self, **options: Any) -> None:
        self.search |= options

    def set_speculative_options(self, **options: Any) -> None:
        self.speculative |= options


class FakeGenerator:
    """Counts up from the last token. With speculation it proposes four tokens in every other round, and keeps two."""

    made: ClassVar[list["FakeGenerator"]] = []

    def __init__(self, model: FakeModel, parameters: FakeParameters) -> None:
        self.model, self.parameters, self.tokens = model, parameters, []
        self._buffered = self._rounds = self._proposed = self._accepted = 0
        FakeGenerator.made.append(self)

    def append_tokens(self, tokens: Sequence[int]) -> None:
        assert isinstance(tokens, list)
        self.tokens += tokens

    def is_done(self) -> bool:
        ends = self.model.config.told["model"].get("eos_token_id", [])
        return len(self.tokens) >= self.parameters.search["max_length"] or self.tokens[-1] in ends

    def generate_next_token(self) -> None:
        if self._buffered:
            self._buffered -= 1
        else:
            self._rounds += 1
            if self.parameters.speculative and self._rounds % 2 == 0:
                self._buffered, self._proposed, self._accepted = 2, self._proposed + 4, self._accepted + 2
        self.tokens.append(self.tokens[-1] + 1)

    def get_speculative_stats(self) -> dict[str, int]:
        assert self.parameters.speculative
        return {
            "tokens_buffered": self._buffered,
            "draft_tokens_proposed": self._proposed,
            "draft_tokens_accepted": self._accepted,
        }

    def get_sequence(self, number: int) -> Any:
        assert number == 0
        return SimpleNamespace(tolist=lambda: list(self.tokens))


@pytest.fixture
def genai_system(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, on the stand-in, with a model that is there already."""
    library = ModuleType("onnxruntime_genai")
    parts = {"Config": FakeConfig, "Model": FakeModel, "GeneratorParams": FakeParameters, "Generator": FakeGenerator}
    for name, part in parts.items():
        setattr(library, name, part)
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", library)
    monkeypatch.delitem(sys.modules, "forerun_export.bench.genai_system", raising=False)
    from forerun_export.bench import genai_system

    monkeypatch.setattr(genai_system, "model_folder", lambda checkpoint, precision: Path(f"{checkpoint}-{precision}"))
    FakeGenerator.made.clear()
    yield genai_system
    sys.modules.pop("forerun_export.bench.genai_system", None)


def system(module: Any, *, threads: int = 2, end_tokens: Sequence[int] = ()) -> Any:
    return module.GenaiSystem("model", threads=threads, end_tokens=list(end_tokens), precision="int4")


def test_plain_decoding_is_a_round_a_token(genai_system: Any) -> None:
    found = system(genai_system).decode(TASK)
    assert found.tokens == tuple(range(8, 16))
    assert [(one.tokens, one.proposed, one.draft) for one in found.rounds] == [(1, None, None)] * 8
    assert [one.at_s for one in found.rounds] == sorted(one.at_s for one in found.rounds)


def test_tokens_that_a_round_gave_together_are_one_round_with_its_proposals(genai_system: Any) -> None:
    found = system(genai_system).decode(Task(tokens=(5, 6, 7), max_new_tokens=8, draft="ngram"))
    told = [(one.tokens, one.proposed, one.accepted, one.draft) for one in found.rounds]
    assert told == [(1, 0, 0, None), (3, 4, 2, "ngram"), (1, 0, 0, None), (3, 4, 2, "ngram")]
    assert sum(one.tokens for one in found.rounds) == len(found.tokens) == 8
    assert FakeGenerator.made[-1].parameters.speculative == {"ngram_size": 3, "max_draft_tokens": 4}


def test_it_ends_at_the_engine_directorys_end_tokens(genai_system: Any) -> None:
    assert system(genai_system, end_tokens=[10, 99]).decode(TASK).tokens == (8, 9, 10)


def test_it_is_told_law_length_and_seed(genai_system: Any) -> None:
    decoder = system(genai_system)
    decoder.decode(TASK)
    assert FakeGenerator.made[-1].parameters.search == {"max_length": 11, "do_sample": False}
    decoder.decode(Task(tokens=(5,), max_new_tokens=2, temperature=0.5, seed=9))
    sampled = {"do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 1.0, "random_seed": 9}
    assert FakeGenerator.made[-1].parameters.search == {"max_length": 3, **sampled}


@pytest.mark.parametrize("best", ["2 threads, spinning", "2 threads, not spinning", "1 thread, spinning"])
def test_the_fastest_thread_setting_is_used_and_told(
    genai_system: Any, monkeypatch: pytest.MonkeyPatch, best: str
) -> None:
    options = genai_system.settings(2)
    speeds = {json.dumps(told): 2.0 if name == best else 1.0 for name, told in options.items()}

    def speed(output: Any) -> float:
        return speeds[json.dumps(FakeGenerator.made[-1].model.config.told["model"]["decoder"]["session_options"])]

    monkeypatch.setattr(genai_system, "_speed", speed)
    decoder = system(genai_system)
    profile = decoder.profile()
    assert profile["setting"] == best
    assert profile["tried_tokens_per_s"] == {name: 2.0 if name == best else 1.0 for name in options}
    decoder.decode(TASK)
    config = FakeGenerator.made[-1].model.config
    assert config.told["model"]["decoder"]["session_options"] == options[best]
    assert config.folder == "model-int4"


def test_settings_use_all_threads_or_half_of_them(genai_system: Any) -> None:
    counts = [told["intra_op_num_threads"] for told in genai_system.settings(5).values()]
    assert counts == [5, 5, 3, 3]
    assert len(genai_system.settings(1)) == 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines")


def test_without_the_package_the_benchmark_runs_and_says_what_to_install(
    pair: TablePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun_export.bench.engines.is_installed", lambda module: False)
    choice = Choice(baselines=(GENAI,))
    found = bench(pair.path, [BenchPrompt("a", "w1")], settings=Settings(max_new_tokens=4), choice=choice)
    reasons = {engine.name: reason for engine, reason in found.failed.items()}
    assert reasons[GENAI] == "needs the package onnxruntime-genai; install it with: pip install 'forerun[genai]'"
    assert reasons[GENAI_NGRAM] == reasons[GENAI]
    assert found.measured.of(PLAIN)


def test_a_broken_package_is_named_by_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime_genai.py").write_text("raise ModuleNotFoundError('gone', name='onnxruntime_genai')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    spec = WorkerSpec(GENAI, "genai", {"checkpoint": "x", "threads": 1, "end_tokens": [], "precision": "int4"})
    with Worker(spec, threads=1) as worker, pytest.raises(Exception, match=r"'forerun\[genai\]'"):
        worker.load()


def test_it_runs_in_forerun_s_precision_with_its_n_grams_beside(
    pair: TablePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun_export.bench.engines.is_installed", lambda module: True)
    choice = Choice(baselines=(GENAI,), checkpoint=str(tiny_llama(tmp_path / "llama")))
    line = line_up(EngineDirectory.open(pair.path), choice, threads=3, available_bytes=None)
    plain, ngram = line.engines[:2]
    assert (plain.name, plain.label, plain.is_plain) == (GENAI, "onnxruntime-genai (fp32)", True)
    assert (ngram.name, ngram.plain, ngram.draft, ngram.worker) == (GENAI_NGRAM, GENAI, "ngram", GENAI)
    assert line.workers[-1].kind == "genai"
    assert line.workers[-1].arguments["precision"] == "fp32"
    assert line.workers[-1].arguments["threads"] == 3


BUILDER = """
import json, pathlib, sys
import transformers
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
checkpoint = sorted(path.name for path in pathlib.Path(given["-i"]).iterdir())
if given["-p"] == "int8":
    sys.exit("RuntimeError: no such luck")
out = pathlib.Path(given["-o"])
out.mkdir()
(out / "told.json").write_text(json.dumps({"given": given, "checkpoint": checkpoint, "by": transformers.__version__}))
"""


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the library's builder, beside the transformers that it needs; the cache folder."""
    library = tmp_path / "library"
    models = library / "onnxruntime_genai" / "models"
    models.mkdir(parents=True)
    for folder in (models, models.parent):
        (folder / "__init__.py").touch()
    (models / "builder.py").write_text(BUILDER)
    (library / "onnxruntime_genai-9.9.dist-info").mkdir()
    (library / "onnxruntime_genai-9.9.dist-info" / "METADATA").write_text("Name: onnxruntime-genai\nVersion: 9.9\n")
    cache = tmp_path / "cache" / "forerun" / "bench"
    packages = cache / "genai-builder-packages"
    packages.mkdir(parents=True)
    (packages / "transformers.py").write_text("__version__ = 'the newer one'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(library))
    return cache


def test_the_model_is_built_once_from_a_checkpoint_in_float32_by_its_own_builder(builder: Path, tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "llama")
    folder = model_folder(str(checkpoint), "int4")
    told = json.loads((folder / "told.json").read_text())
    assert told["by"] == "the newer one"
    assert (told["given"]["-p"], told["given"]["-e"]) == ("int4", "cpu")
    assert told["given"]["--extra_options"] == "accuracy_level=4"
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(told["checkpoint"])
    before = (folder / "told.json").stat().st_mtime_ns
    assert model_folder(str(checkpoint), "int4") == folder
    assert (folder / "told.json").stat().st_mtime_ns == before
    assert sorted(path.name for path in builder.iterdir()) == ["genai-builder-packages", folder.name]


def test_the_accuracy_level_is_that_of_quantized_weights() -> None:
    assert builder_options("fp32") == ["-p", "fp32", "-e", "cpu"]
    assert builder_options("int8")[-2:] == builder_options("int4")[-2:] == ["--extra_options", "accuracy_level=4"]


def test_a_builder_that_fails_is_one_line_and_leaves_nothing(builder: Path, tmp_path: Path) -> None:
    says = (
        r"^the builder of onnxruntime-genai cannot make .*: onnxruntime_genai.models.builder says .*no such luck; leave"
    )
    with pytest.raises(ExportError, match=says):
        model_folder(str(tiny_llama(tmp_path / "llama")), "int8")
    assert [path.name for path in builder.iterdir()] == ["genai-builder-packages"]


def test_packages_that_pip_cannot_fetch_are_one_line(
    builder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (builder / "genai-builder-packages").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ExportError, match=r"pip says .*transformers.*; leave this baseline out$") as caught:
        model_folder(str(tiny_llama(tmp_path / "llama")), "int4")
    assert "\n" not in str(caught.value)
    assert list(builder.iterdir()) == []
