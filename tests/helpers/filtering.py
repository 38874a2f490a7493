"""Filters of a request on random logits, and the laws that transformers and the oracle make of them."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from forerun.oracle import filtered_law
from helpers.sampling import Array, Random
from helpers.sampling_cases import make_logits

TEMPERATURES = [0.3, 1.0, 2.0, 100.0]
TOP_K = [0, 1, 2, 5, 50, 10**6]
TOP_P = [1.0, 0.999, 0.9, 0.5, 1e-6]
MIN_P = [0.0, 1e-3, 0.1, 1.0]
STABLE_SORT = torch.sort
EDGE = 2e-5  # share of the mass by which float32 may move the edge of a nucleus


def filters(rng: Random, batch: int) -> dict[str, Array]:
    """Controls of each request; float32 numbers, as the graph sees them."""
    return {
        "temperature": rng.choice(TEMPERATURES, batch).astype(np.float32),
        "top_k": rng.choice(TOP_K, batch),
        "top_p": rng.choice(TOP_P, batch).astype(np.float32),
        "min_p": rng.choice(MIN_P, batch).astype(np.float32),
    }


def tied_logits(rng: Random, *shape: int) -> Array:
    """Half of the rows on a grid of steps, so that most logits have equals."""
    logits = make_logits(rng, *shape)
    stepped = np.round(logits * 2) / 2
    return np.where(rng.random((*shape[:-1], 1)) < 0.5, stepped, logits).astype(np.float32)


def hugging_face(logits: Array, controls: dict[str, Array], b: int, monkeypatch: pytest.MonkeyPatch) -> Array:
    """The law of [V] logits by transformers' warpers in float64, with torch's sort made stable."""
    monkeypatch.setattr(torch, "sort", partial(STABLE_SORT, stable=True))
    values = {name: value[b].item() for name, value in controls.items()}
    warpers = LogitsProcessorList([TemperatureLogitsWarper(values["temperature"])])
    if values["top_k"]:
        warpers.append(TopKLogitsWarper(int(values["top_k"])))
    if values["top_p"] < 1:
        warpers.append(TopPLogitsWarper(values["top_p"]))
    if values["min_p"] > 0:
        warpers.append(MinPLogitsWarper(values["min_p"]))
    scores = warpers(torch.zeros((1, 1), dtype=torch.long), torch.tensor(logits, dtype=torch.float64)[None])
    law: Array = torch.softmax(scores, -1)[0].numpy()
    return law


def edge_is_near(logits: Array, controls: dict[str, Array], b: int, moved: Array) -> bool:
    """Whether float32 may keep or drop the `moved` tokens: their nucleus or min-p edge is within rounding."""
    temperature, top_p, min_p = (float(controls[name][b]) for name in ("temperature", "top_p", "min_p"))
    law = np.array(filtered_law(logits.tolist(), temperature, top_k=int(controls["top_k"][b])))
    before = [law[logits > logits[x]].sum() for x in moved]
    ties = [law[logits == logits[x]].sum() for x in moved]
    in_nucleus = all(low - EDGE <= top_p <= low + tie + EDGE for low, tie in zip(before, ties, strict=True))
    return in_nucleus or bool(np.allclose(law[moved], min_p * law.max(), rtol=1e-5))


def assert_same_law(found: Array, expected: Array, logits: Array, controls: dict[str, Array], b: int) -> bool:
    """Same tokens and probabilities; returns whether only rounding tells them apart."""
    moved = np.flatnonzero((found > 0) != (expected > 1e-37))
    moved = moved[np.maximum(found[moved], expected[moved]) > 1e-30]
    if len(moved):
        assert edge_is_near(logits, controls, b, moved), (controls, b, moved)
        return True
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-30)
    return False
