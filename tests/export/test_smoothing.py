"""Smoothing changes no logit in float32, shares large channels out, and is told by what the products really read."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from forerun_export.calibration import largest_inputs, observe
from forerun_export.frontends import Decoder, build_decoder
from forerun_export.graph_runner import Floats, GraphRunner
from forerun_export.passes import smoothing
from forerun_export.precision import quantize
from forerun_export.sources import resolve
from helpers.checkpoints import tiny_llama, tiny_qwen2
from helpers.graphs import save, with_weight

PIECES = [[3, 40, 41, 99, 200, 7, 7, 150], [9, 9, 8, 70]]
MODELS: Mapping[str, Callable[[Path], Path]] = {
    "own head": tiny_llama,
    "tied head": partial(tiny_llama, tied=True),
    "biases": tiny_qwen2,
}


@pytest.fixture(scope="module", params=MODELS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A decoder in which a few channels of each norm are a hundred times larger than the others."""
    folder = tmp_path_factory.mktemp("model")
    built = build_decoder(resolve(str(MODELS[request.param](folder / "checkpoint"))), context=64)

    def rough(gain: np.ndarray) -> np.ndarray:
        gain[[3, 17]] *= 100
        return gain

    for name in [name for name in built.model.graph.initializers if "norm" in name]:
        built = with_weight(built, name, rough)
    return built


def copy_of(decoder: Decoder) -> Decoder:
    return Decoder(decoder.model.clone(), decoder.architecture, decoder.frontend)


def logits_of(decoder: Decoder, folder: Path) -> Floats:
    runner = GraphRunner(save(decoder, folder))
    return runner.run(runner.new_caches(1, 64), PIECES[:1], [0])[0]


def observed(decoder: Decoder, folder: Path) -> Mapping[str, Floats]:
    watched = copy_of(decoder)
    observe(watched.model)
    return largest_inputs(GraphRunner(save(watched, folder)), PIECES)


def test_in_float32_nothing_changes_but_the_rounding(tmp_path: Path, decoder: Decoder) -> None:
    smoothed = copy_of(decoder)
    assert smoothing.apply(smoothed.model, largest_inputs=observed(decoder, tmp_path / "watched")).modified
    before, after = logits_of(decoder, tmp_path / "before"), logits_of(smoothed, tmp_path / "after")
    assert np.abs(after - before).max() < 1e-4 * np.abs(before).max()
    assert not np.array_equal(after, before)


def test_products_read_smoother_rows(tmp_path: Path, decoder: Decoder) -> None:
    """The largest channel stands out less from a usual one, wherever something before it could be divided."""
    before = observed(decoder, tmp_path / "before")
    smoothed = copy_of(decoder)
    smoothing.apply(smoothed.model, largest_inputs=before)
    after = observed(smoothed, tmp_path / "after")
    assert set(before) == set(after)
    roughness = {name: [float(each.max() / np.median(each)) for each in (before[name], after[name])] for name in before}
    changed = {name: pair for name, pair in roughness.items() if "o_proj" not in name}
    assert len(changed) == 3 * 3 + 1
    assert all(pair[1] < 0.5 * pair[0] for name, pair in changed.items() if "down" not in name)


def test_int8_comes_closer_to_float32(tmp_path: Path, decoder: Decoder) -> None:
    found = observed(decoder, tmp_path / "watched")
    exact = logits_of(decoder, tmp_path / "exact")
    errors = []
    for number, largest in enumerate((None, found)):
        cheap = copy_of(decoder)
        quantize(cheap.model, "int8", largest_inputs=largest)
        errors.append(float(np.abs(logits_of(cheap, tmp_path / str(number)) - exact).mean()))
    assert errors[1] < 0.7 * errors[0]


def test_what_is_observed_is_what_the_checkpoint_s_layers_read(tmp_path: Path) -> None:
    """Against hooks on the same model in PyTorch."""
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    found = observed(build_decoder(resolve(str(checkpoint)), context=64), tmp_path)
    model, seen = LlamaForCausalLM.from_pretrained(checkpoint), dict[str, np.ndarray]()

    def watch(name: str) -> Callable[[Any, Any], None]:
        def hook(_: Any, inputs: Any) -> None:
            largest = inputs[0].abs().amax(dim=(0, 1)).numpy()
            seen[name] = np.maximum(seen.get(name, largest), largest)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        for piece in PIECES:
            model(input_ids=torch.tensor([piece]))
    assert len(found) == 3 * 4 + 1
    for name, largest in found.items():
        first = re.split(r"[+]|\.weight", name)[0]
        np.testing.assert_allclose(largest, seen[first], rtol=1e-4, err_msg=name)


def test_factors_are_bounded_and_leave_silent_channels_alone() -> None:
    largest_input = np.array([0.0, 1e-9, 1.0, 1e9, 2.0], np.float32)
    largest_weight = np.array([1.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    c = smoothing.factors(largest_input, largest_weight)
    assert c[0] == c[4] == 1
    assert smoothing.LEAST <= c.min() < c[2] < c.max() <= smoothing.MOST


def test_without_statistics_nothing_is_smoothed(decoder: Decoder) -> None:
    outcome = smoothing.apply(copy_of(decoder).model, largest_inputs={})
    assert not outcome.modified
    assert "no product" in outcome.reason
