"""Rates and speed-ups of a benchmark, and their intervals."""

import numpy as np
import pytest

from forerun_export.bench.runs import Round, median_runs
from forerun_export.bench.statistics import percentile, rate, speed_up, spread
from helpers.bench_runs import DRAFTED, FIRST_S, made_run, plain_run


def test_a_rate_is_that_of_all_prompts_together_within_its_interval() -> None:
    found = rate([10, 30, 20], [1.0, 2.0, 4.0])
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.value == pytest.approx(60 / 7)
    assert 5.0 <= found.low < found.value < found.high <= 15.0


def test_the_interval_covers_the_true_rate_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):
        seconds = rng.gamma(20.0, 0.05, size=30)
        found = rate([20.0] * 30, seconds.tolist())
        assert found is not None
        covered += (found.low or 0) <= 20.0 <= (found.high or 0)
    assert 176 <= covered <= 199  # 95%, a little less at 30 prompts


def test_more_prompts_narrow_the_interval() -> None:
    rng = np.random.default_rng(2)
    widths = []
    for count in (10, 160):
        found = rate([20.0] * count, rng.gamma(20.0, 0.05, size=count).tolist())
        assert found is not None
        widths.append((found.high or 0) - (found.low or 0))
    assert widths[1] < widths[0] / 2


def test_a_speed_up_compares_prompt_by_prompt() -> None:
    seconds = [0.1, 5.0, 0.7, 2.0]  # prompts as different as these say nothing against a factor that is always 2
    found = speed_up([(10, s / 2, 10, s) for s in seconds])
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_one_prompt_has_no_interval_and_none_has_no_figure() -> None:
    found = rate([10], [2.0])
    assert found is not None
    assert (found.value, found.low, found.high) == (5.0, None, None)
    assert rate([], []) is None
    assert rate([0], [0.0]) is None


def test_percentiles() -> None:
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert percentile([], 0.5) is None


def test_what_a_run_took_is_told_apart_from_its_prompt() -> None:
    run = plain_run(0, 0.25, 4)
    assert (run.first_token_s, run.decode_s, run.decoded) == pytest.approx((FIRST_S, 1.0, 4))


def test_the_tokens_of_a_round_share_its_time() -> None:
    run = made_run(DRAFTED, 0, [Round(FIRST_S + 0.3, 3), Round(FIRST_S + 0.4, 1)])
    assert list(run.token_times()) == pytest.approx([0.1, 0.1, 0.1, 0.1])


def test_of_repeats_the_median_counts() -> None:
    runs = [plain_run(0, seconds, 4) for seconds in (0.2, 9.0, 0.1)] + [plain_run(1, 0.3, 4)]
    assert [run.decode_s for run in median_runs(runs)] == pytest.approx([0.8, 1.2])


@pytest.mark.parametrize(
    ("count", "median", "decile"),
    [(1, 0.0, 0.0), (2, 0.5, 0.0), (10, 4.5, 0.0), (11, 5.0, 1.0), (20, 9.5, 1.0), (21, 10.0, 2.0), (88, 43.5, 8.0)],
)
def test_the_lowest_decile_is_a_prompts_own_value_and_the_lowest_of_few(
    count: int, median: float, decile: float
) -> None:
    values = [float(number) for number in range(count)]
    np.random.default_rng(0).shuffle(values)
    found = spread(values)
    assert found is not None
    assert (found.median, found.lowest_decile, found.lowest) == (median, decile, 0.0)
    assert found.lowest_decile == np.quantile(values, 0.1, method="lower")


def test_nothing_has_no_spread() -> None:
    assert spread([]) is None
