"""Weights are written once: beside the target's graph, and shared by drafts made of its layers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.errors import ExportError
from forerun_export.frontends import Decoder, build_decoder
from forerun_export.graph_files import (
    ALIGNMENT,
    INLINE_BYTES,
    external_tensors,
    save_graph,
    save_sharing_graph,
)
from forerun_export.sources import resolve
from helpers.checkpoints import tiny_llama
from helpers.graphs import save, with_weight

CONTEXT = 128


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return build_decoder(resolve(str(tiny_llama(tmp_path_factory.mktemp("llama")))), context=CONTEXT)


def test_external_data_is_aligned_and_small_tensors_are_inline(decoder: Decoder, tmp_path: Path) -> None:
    tensors = external_tensors(save(decoder, tmp_path))
    assert tensors
    assert all((tensor.offset or 0) % ALIGNMENT == 0 for tensor in tensors.values())
    assert all(tensor.nbytes >= INLINE_BYTES for tensor in tensors.values())


def test_writing_reports_its_progress_to_the_end(decoder: Decoder, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    weights = tmp_path / "model.onnx.data"
    save_graph(decoder.model, tmp_path / "model.onnx", weights, progress=lambda *step: seen.append(step))
    assert seen == sorted(seen)
    assert seen[-1][0] == weights.stat().st_size == seen[-1][1]


def test_a_sharing_graph_holds_no_weights_of_its_own(decoder: Decoder, tmp_path: Path) -> None:
    target = save(decoder, tmp_path / "target")
    (tmp_path / "draft").mkdir()
    draft = tmp_path / "draft" / "model.onnx"
    save_sharing_graph(decoder.without_layers([1]).model, draft, target)
    assert [path.name for path in (tmp_path / "draft").iterdir()] == ["model.onnx"]
    own, shared = external_tensors(target), external_tensors(draft)
    assert all((own[name].offset, own[name].length) == (t.offset, t.length) for name, t in shared.items())
    assert {tensor.location for tensor in shared.values()} == {"model.onnx.data"}


def other_weights(decoder: Decoder) -> Iterator[Decoder]:
    yield with_weight(decoder, "layers.0.mlp.down_proj", lambda weights: weights * 1.0001)
    yield with_weight(decoder, "layers.0.mlp.down_proj", lambda weights: weights[:, :-1])


def test_a_sharing_graph_with_other_weights_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    target = save(decoder, tmp_path)
    for other in other_weights(decoder):
        with pytest.raises(ExportError, match=r"model\.layers\.0\.mlp\.down_proj.* is not in"):
            save_sharing_graph(other.model, tmp_path / "draft.onnx", target)
        assert not (tmp_path / "draft.onnx").exists()
