"""Measured costs: their curves, where they are kept, and that decoding goes on without a place to keep them."""

import json
import time
from pathlib import Path

import pytest

from forerun import Decoder
from forerun.costs import CostFile, Costs, Curve, RoundShape, RunningCosts, measure
from helpers.table_models import table_pair

CURVE = Curve((1, 2, 4), (10.0, 12.0, 20.0))


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 10), (2, 12), (3, 16), (4, 20), (6, 28), (0, 10)])
def test_a_curve_is_linear_between_its_points_and_beyond(tokens: int, seconds: float) -> None:
    assert CURVE(tokens) == pytest.approx(seconds)


def test_a_noisy_curve_never_falls() -> None:
    noisy = Curve((1, 2, 3), (10.0, 12.0, 11.0))
    assert noisy(9) >= noisy(3) >= 11.0


def test_one_point_is_a_constant() -> None:
    assert Curve((1,), (3.0,))(50) == 3.0


@pytest.mark.parametrize(
    ("tokens", "seconds"), [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((1, 1), (1.0, 1.0))]
)
def test_points_that_make_no_curve_are_refused(tokens: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Curve(tokens, seconds)


def test_every_call_is_measured_at_each_size() -> None:
    names = ("target", "draw_greedy", "draw_sampled", "accept_greedy", "accept_sampled")
    calls = {name: {size: (lambda size=size: time.sleep(size / 1000)) for size in (1, 5)} for name in names}
    costs = measure(calls)
    assert costs.draft is None
    assert costs.draft_s(1) is None
    assert costs.target_s(5) > costs.target_s(1) >= 0.001


def flat_costs() -> Costs:
    flat = Curve((1,), (1.0,))
    return Costs(
        target=CURVE, draft=CURVE, draw_greedy=flat, draw_sampled=flat, accept_greedy=flat, accept_sampled=flat
    )


def test_costs_are_those_of_a_round() -> None:
    costs = flat_costs()
    assert costs.round_s(RoundShape(rows=2, steps=0, width=0, samples=False)) == 12.0 + 1.0
    assert costs.round_s(RoundShape(rows=1, steps=0, width=3, samples=True)) == 20.0 + 1.0
    assert costs.round_s(RoundShape(rows=1, steps=3, width=3, samples=True)) == (12.0 + 10.0 + 10.0 + 3.0) + 20.0 + 1.0


PLAIN = RoundShape(rows=1, steps=0, width=0, samples=False)
WIDE = RoundShape(rows=1, steps=0, width=3, samples=False)


def test_what_slows_every_round_alike_changes_no_ratio() -> None:
    running = RunningCosts(flat_costs())
    for _ in range(300):
        running.observe(PLAIN, 3 * 11.0)
        running.observe(WIDE, 3 * 21.0)
    assert running.round_s(WIDE) / running.round_s(PLAIN) == pytest.approx(21 / 11, rel=0.01)


def test_a_shape_that_takes_longer_than_was_measured_becomes_dearer_than_the_others() -> None:
    running = RunningCosts(flat_costs())
    for _ in range(60):
        running.observe(PLAIN, 11.0)
        running.observe(WIDE, 31.5)
    assert running.round_s(WIDE) / running.round_s(PLAIN) == pytest.approx(31.5 / 11, rel=0.1)


def test_one_slow_round_is_mostly_chance_and_is_forgotten() -> None:
    running = RunningCosts(flat_costs())
    running.observe(WIDE, 1000.0)
    assert running.round_s(WIDE) < 21 * 1.06
    for _ in range(600):
        running.observe(PLAIN, 11.0)
    assert running.round_s(WIDE) / running.round_s(PLAIN) == pytest.approx(21 / 11, rel=0.01)


def measured(path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> tuple[Costs, list[int]]:
    """A decoder's costs, and how often they were measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    measurings: list[int] = []

    def counting(calls: object) -> Costs:
        measurings.append(1)
        return measure(calls)  # type: ignore[arg-type]

    monkeypatch.setattr("forerun.decoder.measure", counting)
    with Decoder(path) as decoder:
        return decoder.costs, measurings


def test_costs_are_measured_once_for_engines_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, other = table_pair(tmp_path / "engines"), table_pair(tmp_path / "others", seed=5)
    first, measurings = measured(pair.path, monkeypatch, tmp_path / "cache")
    assert len(measurings) == 1
    assert first.draft is not None
    again, measurings = measured(pair.path, monkeypatch, tmp_path / "cache")
    assert (again, measurings) == (first, [])
    _, measurings = measured(other.path, monkeypatch, tmp_path / "cache")
    assert len(measurings) == 1


@pytest.mark.parametrize("content", ["", "{}", '{"target": 3}', "[1"])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    pair = table_pair(tmp_path / "engines")
    first, _ = measured(pair.path, monkeypatch, tmp_path / "cache")
    (file,) = (tmp_path / "cache").rglob("*.json")
    assert set(json.loads(file.read_text())) == set(vars(first))
    file.write_text(content)
    _, measurings = measured(pair.path, monkeypatch, tmp_path / "cache")
    assert len(measurings) == 1


def test_without_a_place_to_write_decoding_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = table_pair(tmp_path / "engines")
    (tmp_path / "file").write_text("")
    _, measurings = measured(pair.path, monkeypatch, tmp_path / "file" / "cache")
    assert len(measurings) == 1


def test_plain_decoding_and_fixed_draft_lengths_measure_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = table_pair(tmp_path / "engines")
    monkeypatch.setattr(CostFile, "read", lambda self: pytest.fail("costs were asked for"))
    with pair.open() as decoder:
        decoder.generate([1, 2], max_new_tokens=5, draft="none")
        decoder.generate([1, 2], max_new_tokens=5, draft_length=3)
        decoder.generate([1, 2], max_new_tokens=5, temperature=1.0, seed=1, law="block")
