"""What a benchmark concludes from its runs: figures, losslessness, Leviathan's speed-up."""

import itertools

import pytest

from forerun_export.bench.lossless import lossless
from forerun_export.bench.measuring import Settings
from forerun_export.bench.prediction import expected_tokens, prediction
from forerun_export.bench.runs import Round, Run
from forerun_export.bench.summaries import acceptance_by_position, summary
from forerun_export.bench.time_split import time_split
from helpers.bench_runs import (
    ASSISTED,
    DRAFTED,
    FIRST_S,
    PLAIN_ENGINE,
    TORCH,
    made_run,
    measured_of,
    one_round,
    plain_run,
)

GREEDY, COUPLED, BLOCK = (
    Settings(),
    Settings(temperature=1.0, law="coupled"),
    Settings(temperature=1.0),
)


def test_a_summary_holds_rates_times_and_counts() -> None:
    drafted = made_run(DRAFTED, 0, [one_round(FIRST_S + 0.2, 3, 4), one_round(FIRST_S + 0.4, 3, 4)])
    found = summary(DRAFTED, measured_of(plain_run(0, 0.1, 8), drafted), GREEDY)
    assert found is not None
    assert found.tokens_per_s is not None
    assert found.tokens_per_s.value == pytest.approx(8 / 0.4)
    assert found.speed_ups["forerun-plain"].value == pytest.approx(2.0)
    assert found.first_token_s == pytest.approx((FIRST_S, FIRST_S))
    assert found.prefill_tokens_per_s == pytest.approx(10 / FIRST_S)
    assert found.token_s == pytest.approx((0.05, 0.05))
    assert found.tokens_per_target_call == pytest.approx(9 / 3)


def fast_run(prompt: int, times: float, count: int = 8) -> Run:
    """A drafted run that decodes `count` tokens `times` as fast as a plain run of 0.1 s a token."""
    return made_run(DRAFTED, prompt, [one_round(FIRST_S + 0.1 * count / times, count - 1, count)])


def test_each_prompt_has_a_speed_and_a_speed_up_of_its_own() -> None:
    ratios = [3.0, 0.9, 2.0, 1.5]
    plain = [plain_run(prompt, 0.1, 8) for prompt in range(4)]
    found = summary(DRAFTED, measured_of(*plain, *(fast_run(*one) for one in enumerate(ratios))), GREEDY)
    assert found is not None
    assert found.prompt_tokens_per_s is not None
    one = found.prompt_speed_ups[PLAIN_ENGINE.name]
    assert (one.median, one.lowest_decile, one.lowest) == pytest.approx((1.75, 0.9, 0.9))
    rates = found.prompt_tokens_per_s
    assert (rates.median, rates.lowest) == pytest.approx((17.5, 9.0))
    assert found.speed_ups[PLAIN_ENGINE.name].value != pytest.approx(1.75)  # which weighs prompts by their time
    told = found.to_json()["per_prompt"]
    assert told["speed_ups"][PLAIN_ENGINE.name] == {"median": one.median, "lowest_decile": 0.9, "lowest": 0.9}
    assert told["tokens_per_s"]["median"] == rates.median


def test_a_long_answer_counts_as_one_prompt() -> None:
    plain = [plain_run(0, 0.1, 8), plain_run(1, 0.1, 8), plain_run(2, 0.1, 800)]
    found = summary(
        DRAFTED, measured_of(*plain, fast_run(0, 2.0), fast_run(1, 2.0), fast_run(2, 1.0, count=800)), GREEDY
    )
    assert found is not None
    assert found.prompt_speed_ups[PLAIN_ENGINE.name].median == pytest.approx(2.0)
    assert found.speed_ups[PLAIN_ENGINE.name].value < 1.1


def test_an_answer_without_decoded_tokens_has_no_speed() -> None:
    only_first = made_run(DRAFTED, 1, [])
    plain = [plain_run(0, 0.1, 8), plain_run(1, 0.1, 8)]
    found = summary(DRAFTED, measured_of(*plain, fast_run(0, 2.0), only_first), GREEDY)
    assert found is not None
    assert found.prompt_speed_ups[PLAIN_ENGINE.name].lowest == pytest.approx(2.0)
    assert summary(DRAFTED, measured_of(plain[1], only_first), GREEDY).to_json()["per_prompt"] == {  # type: ignore[union-attr]
        "tokens_per_s": None,
        "speed_ups": {},
    }


def test_categories_are_told_apart() -> None:
    runs = [plain_run(0, 0.1, 8), made_run(PLAIN_ENGINE, 1, [one_round(FIRST_S + 2.0, 0, 0)], category="b")]
    found = {category: summary(PLAIN_ENGINE, measured_of(*runs), GREEDY, category) for category in ("a", "b", "c")}
    assert found["c"] is None
    assert [one.prompts for one in found.values() if one] == [1, 1]


def test_acceptance_counts_a_place_only_where_something_was_proposed_there() -> None:
    rounds = [one_round(1.0, 2, 2), one_round(2.0, 0, 1), one_round(3.0, 1, 4), Round(4.0, 1)]
    assert acceptance_by_position([made_run(DRAFTED, 0, rounds)]) == pytest.approx([2 / 3, 1 / 2, 0.0, 0.0])
    assert acceptance_by_position([plain_run(0, 0.1, 3)]) is None


def runs(engine_tokens: tuple[int, ...], plain_tokens: tuple[int, ...] = (1, 2, 3)) -> list[Run]:
    rounds = [one_round(1.0, 1, 2)]
    return [plain_run(0, 0.1, 3, plain_tokens), made_run(DRAFTED, 0, rounds, engine_tokens)]


@pytest.mark.parametrize("settings", [GREEDY, COUPLED])
def test_what_can_be_compared_is_compared_token_for_token(settings: Settings) -> None:
    same = lossless(DRAFTED, measured_of(*runs((1, 2, 3))), settings)
    assert (same.status, same.equal, same.texts) == ("equal", 1, 1)
    assert lossless(DRAFTED, measured_of(*runs((1, 2, 4))), settings).status == "differs"
    assert lossless(DRAFTED, measured_of(*runs((1, 2))), settings).status == "differs"


def test_one_text_of_many_that_differs_is_seen() -> None:
    others = [plain_run(1, 0.1, 3, (5, 6)), made_run(DRAFTED, 1, [one_round(1.0, 1, 2)], (5, 7))]
    found = lossless(DRAFTED, measured_of(*runs((1, 2, 3)), *others), GREEDY)
    assert (found.status, found.equal, found.texts) == ("differs", 1, 2)


def test_a_repeat_that_differs_is_seen() -> None:
    again = made_run(DRAFTED, 0, [one_round(1.0, 1, 2)], (9, 9))
    for order in ([*runs((1, 2, 3)), again], [again, *runs((1, 2, 3))]):
        assert lossless(DRAFTED, measured_of(*order), GREEDY).status == "differs"


def test_draws_by_chance_point_to_the_certificate() -> None:
    found = lossless(DRAFTED, measured_of(*runs((7, 8, 9))), BLOCK)
    assert found.status == "not checkable"
    assert "forerun certify" in found.how


def test_other_libraries_are_held_to_their_own_plain_decoding() -> None:
    ours, theirs = plain_run(0, 0.1, 3, (1, 2, 3)), plain_run(0, 0.1, 3, (1, 2, 4), TORCH)
    assisted = made_run(ASSISTED, 0, [Round(1.0, 2)], (1, 2, 4))
    found = lossless(ASSISTED, measured_of(ours, theirs, assisted), GREEDY)
    assert (found.status, found.as_forerun_plain) == ("equal", 0)
    assert lossless(TORCH, measured_of(ours, theirs), GREEDY).status == "plain"
    assert lossless(ASSISTED, measured_of(ours, assisted), GREEDY).status == "no reference"
    assert lossless(ASSISTED, measured_of(ours, theirs, assisted), COUPLED).status == "not checkable"


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_expected_tokens_are_those_of_enumeration(acceptance: float, length: int) -> None:
    mean = 0.0
    for kept in itertools.product([True, False], repeat=length):
        probability = 1.0
        for one in kept:
            probability *= acceptance if one else 1 - acceptance
        run = next((place for place, one in enumerate(kept) if not one), length)
        mean += probability * (run + 1)
    assert expected_tokens(acceptance, length) == pytest.approx(mean)


TARGET_S, DRAFT_S = {1: 0.10, 3: 0.14, 5: 0.16}, 0.02


def drafted_run(prompt: int, kept: list[tuple[int, int]], *, sampling: float = 0.0, host: float = 0.0) -> Run:
    """Rounds of (accepted, proposed) whose engines take TARGET_S and DRAFT_S."""
    rounds, at_s = [], FIRST_S
    for accepted, proposed in kept:
        spent = {"target": TARGET_S[proposed + 1], "draft": proposed * DRAFT_S, "sampling": sampling}
        at_s += sum(spent.values()) + host
        rounds.append(one_round(at_s, accepted, proposed, spent))
    return made_run(DRAFTED, prompt, rounds)


def test_the_prediction_is_leviathans_formula() -> None:
    kept = [(4, 4)] * 3 + [(1, 4)] * 2
    found = prediction(DRAFTED, measured_of(plain_run(0, TARGET_S[1], 20), drafted_run(0, kept)))
    assert found is not None
    a = 14 / 16
    assert found.acceptance == pytest.approx(a)
    expected = (1 - a**5) / (1 - a)
    assert found.predicted == pytest.approx(expected / ((4 * DRAFT_S + TARGET_S[5]) / TARGET_S[1]))
    assert found.with_observed_tokens == pytest.approx(19 / 5 / ((4 * DRAFT_S + TARGET_S[5]) / TARGET_S[1]))
    assert found.observed is not None
    assert found.observed.value == pytest.approx(found.with_observed_tokens)  # nothing else takes time here


def test_rounds_of_different_length_are_summed_as_they_were() -> None:
    kept = [(2, 2), (0, 4), (0, 0)]
    found = prediction(DRAFTED, measured_of(plain_run(0, TARGET_S[1], 9), drafted_run(0, kept)))
    assert found is not None
    assert found.mean_draft_length == 2
    seconds = TARGET_S[1] + TARGET_S[3] + TARGET_S[5] + 6 * DRAFT_S
    a = 2 / 3
    tokens = 1 + (1 + a + a**2) + (1 + a + a**2 + a**3 + a**4)
    assert found.predicted == pytest.approx(tokens * TARGET_S[1] / seconds)


def test_the_time_that_the_formula_does_not_know_is_told() -> None:
    kept = [(4, 4), (2, 4)]
    run = drafted_run(0, kept, sampling=0.01, host=0.03)
    found = prediction(DRAFTED, measured_of(plain_run(0, TARGET_S[1], 9), run))
    assert found is not None
    spent = (found.draft, found.verify, found.sampling, found.host)
    assert spent == pytest.approx((4 * DRAFT_S, TARGET_S[5], 0.01, 0.03))
    assert found.observed is not None
    assert found.observed.value < found.with_observed_tokens


def test_a_rounds_time_is_split_and_each_parts_cost_told() -> None:
    kept = [(4, 4), (2, 4)]
    run = drafted_run(0, kept, sampling=0.01, host=0.03)
    found = time_split(DRAFTED, measured_of(plain_run(0, TARGET_S[1], 9), run))
    assert found is not None
    assert found.seconds == pytest.approx({"draft": 4 * DRAFT_S, "target": TARGET_S[5], "sampling": 0.01, "host": 0.03})
    assert (found.rounds, found.tokens) == (2, 4.0)
    assert found.round_s == pytest.approx(0.28)
    assert found.speed_up == pytest.approx(4 * 0.10 / 0.28)
    assert found.draft_free == pytest.approx(4 * 0.10 / 0.20)
    assert found.verification_free == pytest.approx(4 * 0.10 / (0.28 - TARGET_S[5] + TARGET_S[1]))


def test_plain_rounds_are_split_too_and_are_what_others_are_held_to() -> None:
    found = time_split(PLAIN_ENGINE, measured_of(plain_run(0, 0.1, 9)))
    assert found is not None
    assert (found.tokens, found.speed_up, found.draft_free, found.verification_free) == pytest.approx((1, 1, 1, 1))


def test_times_are_split_only_where_engines_tell_them() -> None:
    assert time_split(DRAFTED, measured_of(drafted_run(0, [(1, 2)]))) is None
    torch = plain_run(0, 0.1, 3, engine=TORCH)
    assert time_split(TORCH, measured_of(plain_run(0, 0.1, 3), torch)) is None


def test_proposals_without_an_engine_cost_nothing() -> None:
    rounds = [one_round(FIRST_S + TARGET_S[3], 2, 2, {"target": TARGET_S[3], "draft": 0.0, "sampling": 0.0})]
    found = prediction(DRAFTED, measured_of(plain_run(0, TARGET_S[1], 9), made_run(DRAFTED, 0, rounds)))
    assert found is not None
    assert found.draft_s is None
    assert found.predicted == pytest.approx(3 * TARGET_S[1] / TARGET_S[3])


def test_nothing_is_predicted_without_plain_decoding_or_for_other_libraries() -> None:
    assert prediction(DRAFTED, measured_of(drafted_run(0, [(1, 2)]))) is None
    assert prediction(PLAIN_ENGINE, measured_of(plain_run(0, 0.1, 3))) is None
    assert prediction(TORCH, measured_of(plain_run(0, 0.1, 3), plain_run(0, 0.1, 3, engine=TORCH))) is None
