"""What cheaper weights are said to cost: the numbers against a plain computation of their formulas."""

from pathlib import Path

import numpy as np
import pytest

from forerun_export import quality
from forerun_export.frontends import build_decoder
from forerun_export.graph_runner import Floats, GraphRunner
from forerun_export.precision import quantize
from forerun_export.sources import resolve
from helpers.checkpoints import tiny_llama
from helpers.graphs import save

PIECES = [[3, 40, 41, 99, 200, 7, 7, 150], [9, 9, 8, 70]]


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> tuple[GraphRunner, GraphRunner]:
    """A model in float32 and in int8."""
    folder = tmp_path_factory.mktemp("model")
    decoder = build_decoder(resolve(str(tiny_llama(folder / "checkpoint"))), context=64)
    plain = GraphRunner(save(decoder, folder / "fp32"))
    quantize(decoder.model, "int8")
    return plain, GraphRunner(save(decoder, folder / "int8"))


def log_law(runner: GraphRunner, piece: list[int]) -> np.ndarray:
    logits: Floats = runner.run(runner.new_caches(1, 64), [piece[:-1]], [0])[0]
    exact = logits.astype(np.float64)
    return exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))


def test_the_figures_are_those_of_their_formulas(
    tmp_path: Path, runners: tuple[GraphRunner, GraphRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "CHUNK", 3)  # chunks that end within a piece and with it
    plain, cheap = runners
    quality.save_logits(plain, PIECES, tmp_path / "logits")
    found = quality.distance(cheap, PIECES, tmp_path / "logits")
    log_p, log_q = (np.concatenate([log_law(runner, piece) for piece in PIECES]) for runner in runners)
    following = [token for piece in PIECES for token in piece[1:]]
    places = np.arange(len(following)), following
    assert found.tokens == len(following) == 10
    assert found.perplexity_fp32 == pytest.approx(np.exp(-log_p[places].mean()))
    assert found.perplexity == pytest.approx(np.exp(-log_q[places].mean()))
    assert found.greedy_agreement == pytest.approx((log_p.argmax(axis=1) == log_q.argmax(axis=1)).mean())
    assert found.mean_kl == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean(), rel=1e-4)


def test_a_graph_is_at_no_distance_from_itself(tmp_path: Path, runners: tuple[GraphRunner, GraphRunner]) -> None:
    quality.save_logits(runners[0], PIECES, tmp_path / "logits")
    found = quality.distance(runners[0], PIECES, tmp_path / "logits")
    assert (found.greedy_agreement, found.mean_kl) == (1.0, 0.0)
    assert found.perplexity == found.perplexity_fp32


def test_a_text_is_cut_into_windows_without_a_lone_last_token() -> None:
    assert [len(piece) for piece in quality.windows(range(quality.WINDOW * 2 + 1), context=4096)] == [512, 512]
    assert [len(piece) for piece in quality.windows(range(130), context=64)] == [64, 64, 2]


def test_the_text_is_long_enough_to_tell_precisions_apart() -> None:
    assert len(quality.text().split()) > 1000
