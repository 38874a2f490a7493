"""Filters that keep more than the candidates: exact whatever the sample tells, and to the same bits in any company."""

from typing import Any

import numpy as np
import pytest

from forerun_export.sampling.filters import CANDIDATES, MORE_CANDIDATES
from forerun_export.sampling.wide_rows import BAND
from helpers.filtering import assert_same_law, hugging_face
from helpers.sampling import Array, Random
from helpers.stages import run_stage

SIZE = 20_000
NEUTRAL: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def filtered(logits: Array, **controls: Any) -> Array:
    """Laws [B,R,V] of logits [B,R,V]; a control is a number for all requests, or a list."""
    values = {name: np.broadcast_to(controls.get(name, value), len(logits)) for name, value in NEUTRAL.items()}
    return run_stage("law-filtered", logits=logits, **values)["p"]


def assert_is_transformers(logits: Array, monkeypatch: pytest.MonkeyPatch, **controls: Any) -> Array:
    """Compare every row with the law of transformers; return the laws."""
    laws = filtered(logits, **controls)
    values = {name: np.broadcast_to(controls.get(name, value), len(logits)) for name, value in NEUTRAL.items()}
    for b, r in np.ndindex(logits.shape[:2]):
        expected = hugging_face(logits[b, r], values, b, monkeypatch)
        assert_same_law(laws[b, r], expected, logits[b, r], values, b)
    return laws


def smooth(rng: Random, *shape: int, spread: float = 1.0) -> Array:
    """Logits [..,20000] that have no equals to speak of."""
    drawn: Array = (rng.standard_normal((*shape, SIZE)) * spread).astype(np.float32)
    return drawn


def share_that_keeps(logits: Array, count: int) -> float:
    """The top_p whose nucleus has `count` tokens, as far from both neighbours as can be."""
    weights = np.sort(np.exp(logits.astype(np.float64) - logits.max()))[::-1]
    sums = np.cumsum(weights / weights.sum())
    return float(sums[count - 2] + sums[count - 1]) / 2


EDGES = [CANDIDATES - 1, CANDIDATES, CANDIDATES + 1, BAND, CANDIDATES + BAND, 1000, 4096, 12_345, SIZE - BAND]


@pytest.mark.parametrize("spread", [0.05, 0.8])
@pytest.mark.parametrize("count", EDGES)
def test_a_nucleus_has_the_tokens_it_should_have_to_the_last_one(count: int, spread: float) -> None:
    rng = np.random.default_rng(count)
    logits = smooth(rng, 3, 1, spread=spread)
    laws = filtered(logits, top_p=[share_that_keeps(row[0], count) for row in logits])
    for b in range(3):
        expected = np.argsort(-logits[b, 0], kind="stable")[:count]
        assert np.flatnonzero(laws[b, 0]).tolist() == sorted(expected.tolist())
        assert laws[b, 0].sum(dtype=np.float64) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0, 100.0])
def test_wide_laws_are_those_of_transformers(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    logits = smooth(rng, 5, 1, spread=2.0)
    controls = {"top_p": [0.5, 0.9, 0.99, 0.9, 1.0], "min_p": [0.0, 0.0, 0.0, 0.05, 0.01]}
    assert_is_transformers(logits, monkeypatch, temperature=temperature, **controls)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize(
    "top_k", [CANDIDATES, CANDIDATES + 1, 1000, MORE_CANDIDATES - 1, MORE_CANDIDATES, 5000, SIZE - 1, SIZE, 10**6]
)
def test_more_than_the_candidates_may_be_asked_for(top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In flat rows and in rows so peaked that the nucleus is among the candidates, without and with a min-p."""
    rng = np.random.default_rng(1)
    logits = np.concatenate([smooth(rng, 2, 1), smooth(rng, 2, 1, spread=8.0)])
    laws = assert_is_transformers(logits, monkeypatch, top_k=top_k, top_p=top_p, min_p=[0.0, 0.2] * 2)
    if top_p == 1.0:
        assert (laws[0] > 0).sum() == min(top_k, SIZE)


@pytest.mark.parametrize("equals", [2, 50, 300, BAND + 100, 3000])
@pytest.mark.parametrize("before", [0, 200, CANDIDATES, 1000])
def test_equals_across_an_edge_are_kept_from_the_last(
    equals: int, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens of one logit as fit among the candidates, in a band, or in neither; the edge is among them."""
    rng = np.random.default_rng(before)
    logits = np.tile(smooth(rng, 1, 1, spread=0.1) - 3, (3, 1, 1))
    places = rng.permutation(SIZE)
    logits[..., places[:before]] = 2 + np.arange(before) / 1000
    logits[..., places[before : before + equals]] = 1.0
    law = np.exp(logits[0, 0].astype(np.float64))
    weight_before, tie = law[logits[0, 0] > 1].sum() / law.sum(), np.exp(1.0) / law.sum()
    kept = [1, equals // 2, equals]
    shares = [weight_before + (count - 0.5) * tie for count in kept]
    laws = assert_is_transformers(logits, monkeypatch, top_p=shares)
    for b, count in enumerate(kept):
        expected = np.flatnonzero(logits[b, 0] > 1).tolist() + np.flatnonzero(logits[b, 0] == 1)[-count:].tolist()
        assert np.flatnonzero(laws[b, 0]).tolist() == sorted(expected)


@pytest.mark.parametrize("spacing", [4, 2])
@pytest.mark.parametrize("offset", [-20.0, -3.0, 3.0])
def test_a_sample_that_misleads_costs_no_token(spacing: int, offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens that a sample holds are likelier, or less likely, than the others."""
    rng = np.random.default_rng(2)
    logits = smooth(rng, 4, 1)
    block, place = np.divmod(np.arange(SIZE), 64)
    in_sample = (block % spacing == spacing // 2) & (abs(place - 31.5) < 32 / spacing)
    logits[..., in_sample] += offset
    assert_is_transformers(logits, monkeypatch, top_p=[0.2, 0.5, 0.9, 0.5], top_k=[0, 0, 0, 3000])


@pytest.mark.parametrize("step", [0.5, 0.01])
def test_wide_laws_of_coarse_logits_are_exact(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of thousands of equals, and of some hundreds."""
    rng = np.random.default_rng(3)
    logits = np.round(smooth(rng, 6, 1) / step).astype(np.float32) * np.float32(step)
    min_p = [0.0] * 5 + [0.05]
    top_p, top_k = [0.3, 0.9, 0.99, 1.0, 0.9, 0.9], [0, 0, 0, 3000, 3000, 0]
    assert_is_transformers(logits, monkeypatch, top_p=top_p, top_k=top_k, min_p=min_p)


def steps(rng: Random, *sizes: int) -> Array:
    """Logits [20000] of so many equals each, 1 apart, in random places; what is left is far below and has no equals."""
    logits: Array = smooth(rng) - 30
    places = np.split(rng.permutation(SIZE)[: sum(sizes)], np.cumsum(sizes)[:-1])
    for number, place in enumerate(places):
        logits[place] = -number
    return logits


def last_of(logits: Array, value: float, count: int) -> list[int]:
    """All tokens above this logit and the last `count` of those that equal it."""
    return sorted([*np.flatnonzero(logits > value), *np.flatnonzero(logits == value)[-count:]])


@pytest.mark.parametrize("top_k", [4000, 5000, 6999])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.2])
def test_equals_at_the_kth_beyond_a_band_are_all_kept(
    top_k: int, min_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless min-p ends before them: they have e^-2 = .135 of the weight of the likeliest."""
    logits = steps(np.random.default_rng(7), 1000, 2000, 4000, 6000)
    law = assert_is_transformers(logits[None, None], monkeypatch, top_k=top_k, min_p=min_p)[0, 0]
    assert (law > 0).sum() == (3000 if min_p == 0.2 else 7000)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 700, 999])
@pytest.mark.parametrize("top_k", [0, 5000])
def test_a_nucleus_may_end_among_equals_beyond_a_band(
    level: int, count: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the k-th largest is one of 4000 equals, the nucleus is a share of all these, and may end among them too."""
    sizes = [1000, 2000, 4000, 6000]
    logits = steps(np.random.default_rng(8), *sizes)
    sums = np.cumsum(np.repeat(np.exp(-np.arange(4.0)), sizes))
    total = sums[6999] if top_k else np.exp(logits.astype(np.float64)).sum()
    share = (sums[sum(sizes[:level]) + count - 1] - np.exp(-level) / 2) / total
    law = assert_is_transformers(logits[None, None], monkeypatch, top_k=top_k, top_p=share)[0, 0]
    assert np.flatnonzero(law).tolist() == last_of(logits, -level, count)


@pytest.mark.parametrize("size", [SIZE, SIZE + 1, 151_936])
@pytest.mark.parametrize("controls", [{"top_p": 0.9}, {"top_k": 5000}, {"top_k": 5000, "top_p": 0.25}, {"min_p": 1.0}])
def test_a_row_of_nothing_but_equals_keeps_the_last(controls: dict[str, float], size: int) -> None:
    """All of them if no nucleus ends among them: with a token more than the blocks of 64 hold, too."""
    logits = np.full((1, 1, size), 0.5, np.float32)
    logits[..., ::7] = -np.inf
    left = np.flatnonzero(logits[0, 0] > 0)
    law = filtered(logits, **controls)[0, 0]
    kept = round(controls.get("top_p", 1.0) * len(left))
    assert abs(np.flatnonzero(law).size - kept) <= 1
    assert np.flatnonzero(law).tolist() == left[-np.flatnonzero(law).size :].tolist()


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 4096), (0.5, 8192)])
def test_a_nucleus_that_equals_fill_exactly_takes_no_token_more(top_p: float, kept: int, begin: int) -> None:
    """Of 2^14 equals, whose weights and sums float32 holds exactly; it ends at a block's edge, or within one."""
    end = begin + 2**14
    logits = np.full((1, 1, SIZE), -np.inf, np.float32)
    logits[..., begin:end] = 0.5
    law = filtered(logits, top_p=top_p)[0, 0]
    assert np.flatnonzero(law).tolist() == list(range(end - kept, end))


def test_tokens_that_are_ruled_out_stay_so_in_wide_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    logits = smooth(rng, 4, 1)
    out = rng.random(SIZE) < 0.5
    logits[..., out] = -np.inf
    left = int((~out).sum())
    laws = assert_is_transformers(logits, monkeypatch, top_p=[0.9, 0.999, 1.0, 1.0], top_k=[0, 0, 700, left + 5])
    assert not laws[..., out].any()
    assert [(law > 0).sum() for law in laws[2:, 0]] == [700, left]


def of_all_widths(rng: Random, vocabulary_size: int) -> Array:
    """Logits [2,3,V]: nuclei from a few tokens to most of the vocabulary, and a row of equals in steps."""
    spreads = np.array([[12.0, 3.0, 1.0], [0.3, 0.01, 1.0]])
    logits = rng.standard_normal((2, 3, vocabulary_size)) * spreads[..., None]
    logits[1, 2] = np.round(logits[1, 2] * 4) / 4
    drawn: Array = logits.astype(np.float32)
    return drawn


@pytest.mark.parametrize("vocabulary_size", [SIZE, 151_936])
@pytest.mark.parametrize(
    "controls",
    [
        {"top_p": [0.9, 0.95]},
        {"top_p": [0.9, 0.5], "top_k": [0, 5000]},
        {"top_k": [400, 3000]},
        {"top_k": [3000, 3000], "top_p": [1.0, 0.9]},
        {"top_k": [CANDIDATES, 1000], "top_p": [0.95, 0.9]},
        {"min_p": [0.001, 0.2], "top_p": [1.0, 0.9]},
    ],
)
@pytest.mark.parametrize("equals", [False, True])
def test_wide_rows_have_the_bits_that_they_have_alone(
    vocabulary_size: int, controls: dict[str, list[float]], equals: bool
) -> None:
    """Beside rows that end among more equals than a band holds, too."""
    logits = of_all_widths(np.random.default_rng(5), vocabulary_size)
    if equals:
        logits[0, 1] = np.round(logits[0, 1])
        logits[1, 0] = 1.0
    together = filtered(logits, **controls)
    for b, r in np.ndindex(2, 3):
        alone = filtered(logits[b : b + 1, r : r + 1], **{name: value[b : b + 1] for name, value in controls.items()})
        assert alone[0, 0].tobytes() == together[b, r].tobytes()


@pytest.mark.parametrize("top_k", [1000, 3000])
def test_a_row_without_a_law_leaves_wide_rows_alone(top_k: int) -> None:
    logits = of_all_widths(np.random.default_rng(6), SIZE)
    controls = {"top_p": [0.9, 0.5], "top_k": [0, top_k]}
    before = filtered(logits, **controls)
    for bad in (np.nan, np.inf):
        spoiled = logits.copy()
        spoiled[0, 1, 77] = spoiled[1, 0, 9_000] = bad
        after = filtered(spoiled, **controls)
        assert np.isnan(after[0, 1]).any()
        assert np.isnan(after[1, 0]).any()
        for b, r in ((0, 0), (0, 2), (1, 1), (1, 2)):
            assert after[b, r].tobytes() == before[b, r].tobytes()
