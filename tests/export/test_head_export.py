"""Draft heads, exported: their graphs compute what the head does, row by row, and decode like the target alone."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import forerun
from forerun.cli import main
from forerun.directory import EngineDirectory
from forerun.errors import ExportError
from forerun.inspection import describe
from forerun.invariants import violations
from forerun_export import build, head_parity, row_check
from forerun_export.bench.engines import Choice, line_up
from forerun_export.build import ExportResult, export
from forerun_export.certify.engines import EngineLaws, draw, g_test, naive_score
from forerun_export.certify.statistics import SIGNIFICANCE
from forerun_export.frontends import Decoder, build_decoder
from forerun_export.graph_files import load_graph, save_graph
from forerun_export.graph_runner import Floats, GraphRunner
from forerun_export.head_files import TrainedHead
from forerun_export.head_graph import build_head, with_features
from forerun_export.head_runner import HeadRunner
from forerun_export.heads.folder import HeadFolder
from forerun_export.precision import quantize
from forerun_export.progress import silent
from forerun_export.recipe import read_recipe
from forerun_export.sources import Source, resolve
from helpers.checkpoints import VOCABULARY_SIZE, tiny_gguf, tiny_llama, tiny_llama_of_whole_blocks, tiny_qwen2
from helpers.heads import random_head
from helpers.table_heads import head_of
from helpers.table_models import engine_directory, random_model
from helpers.traced_checkpoints import tiny
from helpers.true_shapes import assert_shapes_are_true

pytestmark = pytest.mark.usefixtures("sampling_graphs_once")

LIMITS = {"context": 128, "batch": 4, "draft_length": 5}
PROMPT = [20, 40, 60, 80]
COUPLED = {"temperature": 1.0, "seed": 7, "law": "coupled"}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def exported(out: Path, target: Path, head: Path, **options: object) -> ExportResult:
    given = {"target": str(target), "draft": f"head:{head}", **LIMITS, **options}
    return export(read_recipe(options=given), out)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_of_whole_blocks(tmp_path_factory.mktemp("llama"), tied=True)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    return random_head(tmp_path_factory.mktemp("heads") / "head", llama)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, llama: Path, head: Path) -> ExportResult:
    """A float32 target with its head in int8."""
    return exported(tmp_path_factory.mktemp("engines") / "out", llama, head, draft_precision="int8")


def test_engines_with_a_head_decode_like_their_target_alone(engines: ExportResult) -> None:
    with forerun.open(engines.path) as decoder:
        for controls in ({}, COUPLED):
            plain = decoder.generate(PROMPT, max_new_tokens=24, draft="none", **controls).token_ids
            for draft_length in (1, 3, 5):
                found = decoder.generate(PROMPT, max_new_tokens=24, draft_length=draft_length, **controls)
                assert found.token_ids == plain
                assert found.stats.by_draft["model"].proposed > 0
        for law in ("residual", "block"):
            sampled = {"temperature": 1.0, "law": law, "seed": 1, "min_new_tokens": 24, "draft_length": 3}
            found = decoder.generate(PROMPT, max_new_tokens=24, **sampled)
            assert len(found.token_ids) == 24
            assert found.stats.by_draft["model"].proposed > 0
            assert decoder.generate(PROMPT, max_new_tokens=24, **sampled).token_ids == found.token_ids


def test_real_graphs_leave_caches_bit_for_bit_as_they_should_be(engines: ExportResult) -> None:
    """Ragged rows, several entries in a call or one, own output or the target's features."""
    with forerun.open(engines.path) as decoder:
        prompts = (PROMPT, [9], list(range(40, 75)))
        rows = [decoder._rows(forerun.Request.of(prompt, max_new_tokens=14, draft_length=4))[0] for prompt in prompts]
        decoder._add(rows)
        while any(row.active for row in rows):
            decoder.scheduler.step()
            assert violations(decoder) == []
        assert all(row.finished() for row in rows)


def test_target_and_head_may_differ_in_precision(tmp_path: Path, llama: Path, head: Path) -> None:
    manifest = exported(tmp_path / "out", llama, head, precision="int8", draft_precision="int4").manifest
    assert manifest.draft is not None
    assert (manifest.target.precision, manifest.draft.precision) == ("int8", "int4")
    with forerun.open(tmp_path / "out") as decoder:
        plain = decoder.generate(PROMPT, max_new_tokens=24, draft="none").token_ids
        assert decoder.generate(PROMPT, max_new_tokens=24, draft_length=4).token_ids == plain


def test_the_manifest_the_summary_and_inspect_tell_of_the_head(engines: ExportResult, head: Path) -> None:
    manifest = json.loads((engines.path / "manifest.json").read_text())
    draft = manifest["draft"]
    assert draft["source"] == f"head:{head}"
    assert draft["feature_layers"] == [1, 1, 3]
    assert draft["head_tokens"] == 100
    assert draft["architecture"]["layers"] == 1
    assert 0 < draft["parity"]["max_error"] <= draft["parity"]["bound"] < 1e-2
    cost = draft["quantization"]
    assert 0.5 < cost["greedy_agreement"] < 1
    assert cost["bytes"] < 0.4 * cost["bytes_fp32"]
    assert 1 < cost["perplexity"] < 1e6
    assert manifest["target"]["feature_layers"] == []
    assert "draft: int8 against fp32" in engines.summary()
    told = describe(EngineDirectory.open(engines.path), None)
    assert "a trained head: it reads the target's features, from behind its layers 1, 1, 3" in told
    assert "logits to 100 tokens only" in told
    assert run("inspect", engines.path, "--verify").exit_code == 0


@pytest.mark.parametrize("role", ["target", "draft"])
def test_every_value_has_the_shape_that_the_graph_declares(engines: ExportResult, role: str) -> None:
    assert_shapes_are_true(engines.path / role / "model.onnx")


def test_only_candidate_tokens_are_ever_proposed(engines: ExportResult, head: Path) -> None:
    candidates = set(TrainedHead.read(head).tokens.tolist())
    with forerun.open(engines.path) as decoder:
        for controls in ({}, COUPLED, {"temperature": 1.5, "law": "block", "seed": 1}):
            chunks = list(decoder.stream(PROMPT, max_new_tokens=40, draft="model", **controls))
            proposed = {token for chunk in chunks for token in (*chunk.token_ids[: chunk.accepted], *chunk.rejected)}
            said = {token for chunk in chunks for token in chunk.token_ids}
            assert proposed <= candidates
            assert said - candidates, "the target says others too"


def test_a_request_that_rules_out_every_candidate_is_served_exactly(engines: ExportResult, head: Path) -> None:
    bias = {int(token): -100.0 for token in TrainedHead.read(head).tokens}
    with forerun.open(engines.path) as decoder:
        for controls in ({}, COUPLED):
            plain = decoder.generate(PROMPT, max_new_tokens=16, draft="none", logit_bias=bias, **controls)
            found = decoder.generate(PROMPT, max_new_tokens=16, draft="model", logit_bias=bias, **controls)
            assert found.token_ids == plain.token_ids


# Graphs.


class Built:
    """A checkpoint's target and head as graphs in memory."""

    def __init__(self, checkpoint: Path, folder: Path, *, tokens: int = 60) -> None:
        self.source: Source = resolve(str(checkpoint))
        self.folder = folder
        self.head = TrainedHead.read(random_head(folder / "head", checkpoint, tokens=tokens, seed=3))
        self.plain = build_decoder(self.source, context=128)
        self.target, self.draft = self.graphs(self.head)

    def graphs(self, head: TrainedHead) -> tuple[Decoder, Decoder]:
        return with_features(self.plain, head), build_head(head, self.source, self.plain, context=128, frontend="auto")

    def save(self, decoder: Decoder, name: str) -> Path:
        path = self.folder / f"{name}.onnx"
        save_graph(decoder.model, path, path.with_suffix(".data"))
        return path


ARCHITECTURES: Mapping[str, Callable[[Path], Path]] = {
    "Llama, a head of its own": tiny_llama,
    "Qwen2, biases, a tied head": tiny_qwen2,
    "Qwen3, norms of queries and keys": lambda folder: tiny(folder, "qwen3"),
    "Phi-3, one matrix for queries, keys and values": lambda folder: tiny(folder, "phi3"),
    "Mistral, a window": lambda folder: tiny(folder, "mistral"),
    "GGUF": tiny_gguf,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_graphs_compute_what_the_head_does_in_pytorch(tmp_path: Path, name: str) -> None:
    built = Built(ARCHITECTURES[name](tmp_path / "checkpoint"), tmp_path)
    expected = head_parity.reference(built.head, built.source, context=128)
    paths = built.save(built.draft, "draft"), built.save(built.target, "target")
    found = head_parity.check(*paths, built.head.tokens, expected)
    assert 0 < found.max_error <= found.bound < 1e-2


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Built:
    return Built(llama, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def expected(built: Built) -> head_parity.HeadReference:
    return head_parity.reference(built.head, built.source, context=128)


def changed(head: TrainedHead, **tensors: np.ndarray) -> TrainedHead:
    folder = HeadFolder(
        head.record, {**head.folder.tensors, **{name.replace("__", "."): a for name, a in tensors.items()}}
    )
    return TrainedHead(head.path, folder)


def other_layers(head: TrainedHead) -> TrainedHead:
    record = replace(head.record, feature_layers=(2, 1, 3))
    return TrainedHead(head.path, HeadFolder(record, head.folder.tensors))


def other_epsilon(head: TrainedHead) -> TrainedHead:
    return TrainedHead(head.path, HeadFolder(replace(head.record, epsilon=0.01), head.folder.tensors))


def other_norm(head: TrainedHead) -> TrainedHead:
    tensors = head.folder.tensors
    return changed(head, feature_norm__weight=tensors["embedding_norm.weight"])


def swapped_halves(head: TrainedHead) -> TrainedHead:
    matrix = head.folder.tensors["join.weight"]
    return changed(head, join__weight=np.roll(matrix, matrix.shape[1] // 2, axis=1))


def other_candidates(head: TrainedHead) -> TrainedHead:
    return changed(head, tokens=np.sort((head.tokens + 1) % VOCABULARY_SIZE).astype(np.int32))


FAULTS = [other_layers, other_epsilon, other_norm, swapped_halves, other_candidates]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_graph_that_does_not_compute_its_head_is_refused(
    built: Built, expected: head_parity.HeadReference, fault: Callable[[TrainedHead], TrainedHead]
) -> None:
    target, draft = built.graphs(fault(built.head))
    with pytest.raises(ExportError, match="does not compute what its head does"):
        head_parity.check(built.save(draft, "wrong"), built.save(target, "wrong-target"), built.head.tokens, expected)


class Step:
    """A head's graph in some precision, run on features that stand for nothing."""

    def __init__(self, built: Built, precision: str) -> None:
        path = built.save(built.draft, f"plain-{precision}")
        model = load_graph(path, path.parent)
        quantize(model, precision)  # type: ignore[arg-type]
        path = built.folder / f"{precision}.onnx"
        save_graph(model, path, path.with_suffix(".data"))
        self.runner = GraphRunner(path)
        random = np.random.default_rng(1)
        self.features = random.normal(size=(3, 1, 64, 64)).astype(np.float32)
        self.tokens = random.integers(0, VOCABULARY_SIZE, size=(3, 40))

    def run(self, rows: list[int], pieces: list[int], *, capacity: int = 64, slots: int = 64) -> Floats:
        """Logits and outputs of the first of these rows, token by token, read in calls of these lengths."""
        caches, start, found = self.runner.new_caches(len(rows), capacity), 0, []
        for length in pieces:
            places = np.broadcast_to(np.arange(start, start + length), (len(rows), length))
            more = {"features": self.features[rows][:, :, :slots], "feature_rows": np.ascontiguousarray(places)}
            tokens = self.tokens[rows][:, start : start + length]
            logits, hidden = self.runner.run_with_hidden(caches, tokens, [start] * len(rows), more=more)
            found.append(np.concatenate([logits[0], hidden[0, 0]], axis=1))
            start += length
        return np.concatenate(found)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_row_of_the_head_has_the_same_bits_whatever_is_beside_it(built: Built, precision: str) -> None:
    step = Step(built, precision)
    expected = step.run([0], [1] * 24)
    for pieces in ([24], [2] * 12, [9, 1, 5, 9], [17, 7]):
        assert np.array_equal(step.run([0], pieces), expected)
        assert np.array_equal(step.run([0, 2, 1], pieces, capacity=128), expected)
    assert np.array_equal(step.run([0, 1], [1] * 24, slots=30), expected)


def test_the_row_check_of_an_export_sees_a_head_whose_rows_see_one_another(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = built.save(built.draft, "draft"), built.save(built.target, "target")
    runner = HeadRunner(*(GraphRunner(path) for path in paths))
    row_check.check(runner, precision="fp32")
    run = GraphRunner.run

    def seeing(self: GraphRunner, *arguments: Any, **options: Any) -> Floats:
        logits = run(self, *arguments, **options)
        return logits + 1e-6 * logits.shape[1] if "features" in options.get("more", {}) else logits

    monkeypatch.setattr(GraphRunner, "run", seeing)
    with pytest.raises(ExportError, match="logits depend on how many tokens share a call"):
        row_check.check(runner, precision="fp32")


# What is refused, and what cannot be had.


def test_a_head_in_a_recipe_is_found_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('[target]\nsource = "./t.gguf"\n[draft]\nsource = "head:heads/mine"\n')
    draft = read_recipe(tmp_path / "one.toml").draft
    assert draft is not None
    assert (draft.head, draft.source) == (str(tmp_path / "heads/mine"), None)


def test_another_head_is_another_export_and_the_same_head_elsewhere_is_not(
    tmp_path: Path, llama: Path, head: Path
) -> None:
    def key(folder: Path) -> str:
        given = {"target": str(llama), "draft": f"head:{folder}", **LIMITS}
        return build._resolve(read_recipe(options=given), silent).key

    moved = Path(shutil.copytree(head, tmp_path / "moved"))
    assert key(moved) == key(head)
    assert key(random_head(tmp_path / "other", llama, seed=5)) != key(head)


@pytest.mark.parametrize(
    ("draft", "options", "says"),
    [
        ("head:", [], "--draft: expected the folder of a head behind head:"),
        ("head:nowhere", [], "nowhere"),
        ("head:{head}", ["--draft-vocabulary", "50"], "--draft-vocabulary: a head has candidate tokens of its own"),
        ("head:{wider}", [], "hidden size"),
        ("head:{qwen2}", [], "is no head for"),
    ],
)
def test_a_head_that_cannot_be_used_is_one_line_and_leaves_nothing(
    tmp_path: Path, llama: Path, head: Path, draft: str, options: list[str], says: str
) -> None:
    others: dict[str, Path] = {"head": head}
    if "wider" in draft:
        others["wider"] = random_head(tmp_path / "wider", tiny_llama(tmp_path / "target", hidden=96))
    if "qwen2" in draft:  # as wide, of another kind of layer
        others["qwen2"] = random_head(tmp_path / "qwen2", tiny_llama(tmp_path / "target", hidden=64, intermediate=40))
    result = run(
        "export",
        "--target",
        llama,
        "--draft",
        draft.format(**others),
        *options,
        "--out",
        tmp_path / "out",
        "--context",
        64,
    )
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert says in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_head_for_other_tokens_is_refused(tmp_path: Path, llama: Path, head: Path) -> None:
    path = Path(shutil.copytree(head, tmp_path / "head")) / "head.json"
    record = json.loads(path.read_text())
    record["target"]["vocabulary_sha256"] = "0" * 64
    path.write_text(json.dumps(record))
    with pytest.raises(ExportError, match="was trained for other tokens"):
        exported(tmp_path / "out", llama, tmp_path / "head")


def test_assisted_generation_with_a_head_cannot_be_had_and_says_why(engines: ExportResult) -> None:
    directory = EngineDirectory.open(engines.path)
    line = line_up(directory, Choice(baselines=("torch-assisted",)), threads=1, available_bytes=None)
    assert "trained head" in line.unavailable["torch-assisted"]
    assert "forerun, trained head (int8)" in [engine.label for engine in line.engines]
    assert [worker.name for worker in line.workers] == [
        "forerun-plain",
        "forerun-model",
        "forerun-ngram",
        "forerun-auto",
    ]


def test_certify_holds_a_head_to_its_target_s_law(tmp_path: Path) -> None:
    target, head = random_model(31, vocabulary=8, spread=1.0), head_of(random_model(32, vocabulary=8, spread=1.0))
    folder = engine_directory(tmp_path / "engines", target, head, batch=32)
    with forerun.open(folder) as decoder:
        assert decoder.manifest.draft is not None
        laws = EngineLaws(decoder, decoder.manifest.draft), EngineLaws(decoder, decoder.manifest.target)
        for context in ((1, 2), (5, 0, 7, 7)):
            logits = np.array(head.logits(context))
            assert np.allclose(laws[0](context), np.exp(logits) / np.exp(logits).sum(), atol=1e-6)
        assert laws[0]((1,)) == laws[1]((1,))
        for law in ("residual", "block"):
            drawn = draw(decoder, [(1, 2)], law, samples=250)
            assert g_test(drawn, laws[1]).p_value > SIGNIFICANCE
            assert naive_score(drawn, laws[1], laws[0]).p_value > SIGNIFICANCE
