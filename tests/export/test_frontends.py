"""A checkpoint that cannot become a decoder is refused with the reason; one that can is built in silence."""

from pathlib import Path

import pytest

from forerun.errors import ExportError
from forerun_export.frontends import FrontendName, build_decoder
from forerun_export.sources import Source, resolve
from helpers.checkpoints import tiny_llama, tiny_mistral_with_window

CONTEXT = 128


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return resolve(str(tiny_llama(tmp_path_factory.mktemp("llama"))))


def test_mobius_refuses_a_sliding_window_shorter_than_the_context_and_auto_takes_optimum_then(tmp_path: Path) -> None:
    source = resolve(str(tiny_mistral_with_window(tmp_path)))
    with pytest.raises(ExportError, match="sliding window of 32 tokens"):
        build_decoder(source, context=CONTEXT, frontend="mobius")
    steps: list[str] = []
    decoder = build_decoder(source, context=CONTEXT, report=lambda step, done=0, total=1: steps.append(step))
    assert decoder.frontend == "optimum"
    assert any("using optimum, as" in step and "sliding window" in step for step in steps), "it says why"
    assert build_decoder(source, context=32).frontend == "mobius"


def test_auto_takes_the_builder_s_graph_where_there_is_one(source: Source) -> None:
    assert build_decoder(source, context=CONTEXT).frontend == "mobius"


def test_a_context_beyond_the_model_s_positions_is_refused(source: Source) -> None:
    with pytest.raises(ExportError, match="context 513 is longer than the 512 positions"):
        build_decoder(source, context=513)


def test_an_architecture_that_the_front_end_does_not_know_is_named(source: Source, tmp_path: Path) -> None:
    for file in source.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes().replace(b'"llama"', b'"abacus"'))
    with pytest.raises(ExportError, match="abacus"):
        build_decoder(resolve(str(tmp_path)), context=CONTEXT)


@pytest.mark.parametrize("frontend", ["mobius", "optimum", "auto"])
def test_a_checkpoint_that_lacks_a_weight_is_refused(source: Source, frontend: FrontendName, tmp_path: Path) -> None:
    """transformers would draw the weight at random."""
    from safetensors.torch import load_file, save_file

    for file in source.path.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(source.path / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match=r"lacks .*model\.layers\.1\.mlp\.down_proj"):
        build_decoder(resolve(str(tmp_path)), context=CONTEXT, frontend=frontend)


@pytest.mark.parametrize("frontend", ["mobius", "optimum"])
def test_building_is_silent_and_reports_its_steps(
    source: Source, frontend: FrontendName, capfd: pytest.CaptureFixture[str]
) -> None:
    steps: list[str] = []
    build_decoder(source, context=CONTEXT, frontend=frontend, report=lambda step, done=0, total=1: steps.append(step))
    assert steps
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
