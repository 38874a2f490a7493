"""Whole exports whose weights are cheaper than float32, or whose drafts propose fewer tokens."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import forerun
from forerun.cli import main
from forerun.directory import EngineDirectory
from forerun.errors import ExportError
from forerun.inspection import describe
from forerun_export import row_check
from forerun_export.build import ExportResult, export
from forerun_export.recipe import read_recipe
from helpers.checkpoints import tiny_llama, tiny_llama_of_whole_blocks
from helpers.true_shapes import assert_shapes_are_true

pytestmark = pytest.mark.usefixtures("sampling_graphs_once")

LIMITS = {"context": 128, "batch": 4, "draft_length": 5}
PROMPT = [20, 40, 60, 80]
SPECIAL_TOKENS = 16
CONTROLS = (
    {},
    {"temperature": 1.0, "seed": 3, "law": "coupled"},
    {"temperature": 0.8, "seed": 3, "law": "residual"},
    {"temperature": 0.8, "seed": 3, "law": "block", "top_p": 0.9},
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_of_whole_blocks(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("small"), tied=True, seed=4)


def exported(out: Path, llama: Path, **options: object) -> ExportResult:
    return export(read_recipe(options={"target": str(llama), **LIMITS, **options}), out)  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> ExportResult:
    """An int8 target, and itself without a layer as a draft that proposes fewer tokens."""
    out = tmp_path_factory.mktemp("engines") / "shared"
    return exported(out, llama, draft="layers:1", precision="int8", draft_vocabulary=100)


def decode(engines: Path, **controls: object) -> tuple[int, ...]:
    with forerun.open(engines) as decoder:
        return decoder.generate(PROMPT, max_new_tokens=24, **controls).token_ids


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_quantized_pair_decodes_like_its_target_alone(shared: ExportResult) -> None:
    plain = decode(shared.path, draft="none")
    assert all(decode(shared.path, draft_length=length) == plain for length in (1, 3, 5))
    coupled = {"temperature": 1.0, "seed": 7, "law": "coupled"}
    assert decode(shared.path, **coupled) == decode(shared.path, draft="none", **coupled)


@pytest.mark.parametrize(("precision", "drafts"), [("fp32", "int8"), ("int8", "int4"), ("int4", "fp32")])
def test_target_and_draft_may_differ_in_precision(
    tmp_path: Path, llama: Path, small: Path, precision: str, drafts: str
) -> None:
    out = tmp_path / "out"
    manifest = exported(out, llama, draft=str(small), precision=precision, draft_precision=drafts).manifest
    assert manifest.draft is not None
    assert (manifest.target.precision, manifest.draft.precision) == (precision, drafts)
    assert decode(out) == decode(out, draft="none")


def test_a_draft_of_the_target_s_layers_reads_its_quantized_weights(shared: ExportResult) -> None:
    files = {str(path.relative_to(shared.path)) for path in shared.path.rglob("*") if path.is_file()}
    assert files == {*shared.manifest.files, "manifest.json"}
    assert [name for name in files if name.endswith(".data")] == ["target/model.onnx.data"]
    assert shared.manifest.draft is not None
    assert shared.manifest.draft.weights == "target/model.onnx.data"


def test_a_draft_beside_its_target_s_weights_has_the_shapes_that_it_declares(shared: ExportResult) -> None:
    assert_shapes_are_true(shared.path / "draft" / "model.onnx", weights_folder=shared.path / "target")


@pytest.mark.parametrize("controls", CONTROLS, ids=str)
def test_a_smaller_vocabulary_is_all_that_a_draft_proposes(shared: ExportResult, controls: dict[str, object]) -> None:
    """And the target still says tokens beyond it, which are corrections."""
    with forerun.open(shared.path) as decoder:
        accepted, others = set[int](), set[int]()
        for chunk in decoder.stream(PROMPT, max_new_tokens=60, **controls):
            accepted.update(chunk.token_ids[: chunk.accepted])
            others.update(chunk.token_ids[chunk.accepted :])
    assert max(accepted, default=0) < 100
    assert max(others) >= 100


def test_the_special_tokens_stay_in_a_smaller_vocabulary(tmp_path: Path, llama: Path) -> None:
    result = exported(tmp_path / "out", llama, draft="layers:1", draft_vocabulary=10)
    target, draft = result.manifest.target, result.manifest.draft
    assert draft is not None
    assert (target.head_tokens, draft.head_tokens) == (None, SPECIAL_TOKENS)
    assert target.quantization is None, "float32 is at no distance from itself"
    assert len(result.summary().splitlines()) == 1


@pytest.mark.parametrize("bias", [dict.fromkeys(range(100), -100.0), {150: 100.0}], ids=["against", "beyond"])
def test_a_request_that_wants_what_the_draft_lacks_is_served_exactly(
    shared: ExportResult, bias: dict[int, float]
) -> None:
    plain = decode(shared.path, logit_bias=bias, draft="none")
    assert decode(shared.path, logit_bias=bias) == plain
    coupled = {"temperature": 1.0, "seed": 7, "law": "coupled", "logit_bias": bias}
    assert decode(shared.path, **coupled) == decode(shared.path, draft="none", **coupled)
    assert len(decode(shared.path, temperature=1.0, seed=7, law="block", logit_bias=bias)) == 24


def test_the_manifest_the_summary_and_inspect_tell_what_it_costs(shared: ExportResult) -> None:
    manifest = json.loads((shared.path / "manifest.json").read_text())
    for role, products in (("target", 13), ("draft", 9)):
        cost = manifest[role]["quantization"]
        assert manifest[role]["precision"] == "int8"
        assert cost["products"] == {"int8": products}
        assert cost["bytes"] < 0.4 * cost["bytes_fp32"]
        assert cost["tokens"] > 1000
        assert 0.5 < cost["perplexity"] / cost["perplexity_fp32"] < 2
        assert 0.5 < cost["greedy_agreement"] <= 1
        assert 0 < cost["mean_kl"] < 1
    assert manifest["draft"]["head_tokens"] == 100
    assert "target: int8 against fp32" in shared.summary()
    assert set(shared.to_json()["quantization"]) == {"target", "draft"}
    told = describe(EngineDirectory.open(shared.path), None)
    assert "perplexity" in told
    assert "logits to 100 tokens only" in told
    assert "before quantizing: logits within" in told


def test_a_format_whose_rows_see_one_another_is_refused_and_leaves_nothing(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(runner: object, *, precision: str) -> None:
        raise ExportError(f"in {precision}, logits depend")

    monkeypatch.setattr(row_check, "check", refuse)
    with pytest.raises(ExportError, match="in int8"):
        exported(tmp_path / "out", llama, precision="int8")
    assert list(tmp_path.iterdir()) == []


def test_a_precision_for_a_draft_of_layers_must_be_the_target_s(tmp_path: Path, llama: Path) -> None:
    result = run(
        "export", "--target", llama, "--draft", "layers:1", "--draft-precision", "int8", "--out", tmp_path / "x"
    )
    assert result.exit_code == 1
    assert "--draft-precision: expected fp32 as the target's" in result.stderr
