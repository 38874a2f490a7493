"""The draft head in PyTorch: its unrolled steps, and the folder that it is kept in."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forerun.errors import ExportError
from forerun_export.eager import load_eager
from forerun_export.heads.folder import SCHEMA_VERSION, HeadRecord, HeadTarget, read_head, write_head
from forerun_export.heads.module import ChainCache, DraftHead, chain_mask, feature_layers, load_weights
from forerun_export.heads.teacher import Teacher
from forerun_export.sources import resolve
from helpers.checkpoints import tiny_llama, tiny_mistral_with_window, tiny_qwen2
from helpers.traced_checkpoints import TINY, tiny

HIDDEN = 48
MODELS = {"llama": tiny_llama, "qwen2": tiny_qwen2, "mistral": tiny_mistral_with_window}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", [1, 4])
def test_unrolled_steps_are_those_of_drafting_one_token_at_a_time(tmp_path: Path, name: str, first: int) -> None:
    head = DraftHead(load_eager(resolve(str(MODELS[name](tmp_path))))).double()
    entries, steps = 10, 4
    hidden, embeddings = _random(2, entries, 3 * HIDDEN), _random(2, entries, HIDDEN, seed=1)
    with torch.no_grad():
        unrolled = head.unroll(hidden, embeddings, steps=steps, first=first)
        for base in range(first - 1, entries - steps):
            for step, drafted in enumerate(_drafted(head, hidden, embeddings, base, steps)):
                found = unrolled[step][:, base + step - (first if step else 0)]
                # The layer of transformers computes norms in float32.
                assert torch.allclose(found, drafted, rtol=0, atol=2e-5), (base, step)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def _drafted(
    head: DraftHead, hidden: torch.Tensor, embeddings: torch.Tensor, base: int, steps: int
) -> list[torch.Tensor]:
    """What a round gives whose last true feature is that of entry `base`: a [2,h] of each step."""
    cache, count = ChainCache(), base + 1
    causal = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    a = head(head.feature(hidden[:, :count]), embeddings[:, :count], cache, causal, torch.arange(count)[None])[:, -1:]
    outputs = [a]
    for at in range(count, base + steps):
        everything = torch.ones(1, 1, 1, at + 1, dtype=torch.bool)
        outputs.append(head(outputs[-1], embeddings[:, at : at + 1], cache, everything, torch.tensor([[at]])))
    return [output[:, 0] for output in outputs]


def test_a_step_sees_true_features_up_to_its_base_and_its_own_chain() -> None:
    mask = chain_mask(5, 2, first=2)[0, 0].int().tolist()
    # Entries 2, 3, 4; keys 0-4 of step 0, then keys 2-4 of step 1, then keys 2-4 of step 2.
    assert mask == [
        [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1],
    ]


def test_a_target_of_two_layers_is_refused() -> None:
    with pytest.raises(ExportError, match="has 2 layers; a draft head reads three"):
        feature_layers(2)


def test_feature_layers_are_three_different_ones_up_to_the_last() -> None:
    for layers in range(3, 100):
        numbers = feature_layers(layers)
        assert sorted({*numbers}) == list(numbers)
        assert numbers[0] >= 1
        assert numbers[-1] == layers


def test_a_folder_gives_the_head_back_in_half_precision(tmp_path: Path) -> None:
    target = load_eager(resolve(str(tiny_llama(tmp_path / "target"))))
    head = _changed(DraftHead(target))
    write_head(tmp_path / "head", _record(), _tensors(head), "# A card\n")
    folder, other = read_head(tmp_path / "head"), DraftHead(target)
    load_weights(other, folder.tensors)
    for name, weight in head.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight.half().float()), name
    assert folder.record == _record()
    assert folder.tokens.tolist() == [3, 5, 8]
    assert "self_attn.q_proj.weight" in folder.layer()
    assert (tmp_path / "head" / "README.md").read_text() == "# A card\n"


def _changed(head: DraftHead) -> DraftHead:
    with torch.no_grad():
        head.join.weight += 0.1
    return head


def _record(**changes: Any) -> HeadRecord:
    values = {"schema": SCHEMA_VERSION, "feature_layers": (1, 2, 3), "epsilon": 1e-6} | changes
    return HeadRecord(target=HeadTarget("0" * 64, "1" * 64, 272, HIDDEN), **values)


def _tensors(head: DraftHead) -> dict[str, Any]:
    weights = {name: tensor.numpy() for name, tensor in head.state_dict().items()}
    return {**weights, "tokens": np.array([3, 5, 8], np.int32)}


FAULTS = {
    "a tensor is missing": ({"norm.weight": None}, "norm.weight is missing"),
    "a tensor has another shape": (
        {"fuse.weight": np.zeros((4, 4))},
        r"fuse.weight has shape \[4, 4\], not \[48, 144\]",
    ),
    "no tokens": ({"tokens": None}, "names no tokens"),
    "tokens out of order": ({"tokens": np.array([5, 3])}, "not ascending"),
    "a token twice": ({"tokens": np.array([3, 3])}, "not ascending"),
    "a token beyond the vocabulary": ({"tokens": np.array([3, 272])}, "not ascending ids of its target"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_is_not_whole_is_refused_by_the_tensor_at_fault(tmp_path: Path, fault: str) -> None:
    changes, message = FAULTS[fault]
    head = DraftHead(load_eager(resolve(str(tiny_llama(tmp_path / "target")))))
    tensors = {name: array for name, array in {**_tensors(head), **changes}.items() if array is not None}
    with pytest.raises(ExportError, match=message):
        write_head(tmp_path / "head", _record(), tensors, "")
    assert not (tmp_path / "head").exists()


def test_a_head_of_another_target_is_refused_by_name(tmp_path: Path) -> None:
    llama = DraftHead(load_eager(resolve(str(tiny_llama(tmp_path / "llama")))))
    qwen = DraftHead(load_eager(resolve(str(tiny_qwen2(tmp_path / "qwen")))))
    with pytest.raises(ExportError, match=r"layer\.self_attn\.\w+\.\w+ does not fit its target"):
        load_weights(qwen, _tensors(llama))


def test_folders_that_hold_no_head_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="holds no draft head"):
        read_head(tmp_path / "nothing")
    head = DraftHead(load_eager(resolve(str(tiny_llama(tmp_path / "target")))))
    path = tmp_path / "head"
    write_head(path, _record(), _tensors(head), "")
    record = json.loads((path / "head.json").read_text())
    for change, message in (({"schema": 9}, "schema: 9 is not 1"), ({"feature_layers": [1, 2]}, "no three layers")):
        (path / "head.json").write_text(json.dumps(record | change))
        with pytest.raises(ExportError, match=message):
            read_head(path)
    (path / "head.json").write_text(json.dumps(record))
    (path / "head.safetensors").write_bytes((path / "head.safetensors").read_bytes()[:-100])
    with pytest.raises(ExportError, match="is damaged"):
        read_head(path)


def test_a_head_that_was_half_replaced_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors with the record of the old ones would tell the wrong figures."""
    head = DraftHead(load_eager(resolve(str(tiny_llama(tmp_path / "target")))))
    path = tmp_path / "head"
    write_head(path, _record(), _tensors(head), "")
    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if target.name == "README.md":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_head(path, _record(), _tensors(head), "")
    with pytest.raises(ExportError, match=r"holds no draft head: .*head\.json"):
        read_head(path)


@pytest.mark.parametrize("kind", TINY)
def test_a_target_of_any_kind_can_have_a_head_or_is_told_why_not(tmp_path: Path, kind: str) -> None:
    source = resolve(str(tiny(tmp_path / kind, kind)))
    if kind in ("llama", "qwen2", "qwen3", "phi3", "mistral"):
        assert Teacher(source).layers == (1, 2, 3)
    else:
        other = r"makes its logits in another way than draft heads do|does not end in decoder layers and an RMSNorm"
        with pytest.raises(ExportError, match=f"a {kind} ({other})"):
            Teacher(source)
