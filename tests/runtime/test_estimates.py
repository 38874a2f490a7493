"""Estimates of acceptance: where they begin, what they converge to, and that what was given up is tried again."""

import random
import statistics

import pytest

from forerun.estimates import OPTIMISTS, Acceptance


def learn_rounds(sequence: object, truth: float, *, rounds: int, kind: int = 0, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        accepted = next((place for place in range(4) if rng.random() >= truth), 4)
        sequence.learn([kind] * 4, accepted)  # type: ignore[attr-defined]


def test_a_sequence_begins_with_the_prior() -> None:
    sequence = Acceptance([0.75, 0.1]).sequence()
    assert [sequence.probability(kind) for kind in (0, 1)] == pytest.approx([0.75, 0.1])


@pytest.mark.parametrize("truth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_sequence_converges_to_what_it_sees(truth: float) -> None:
    found = []
    for seed in range(20):
        sequence = Acceptance([0.7]).sequence()
        learn_rounds(sequence, truth, rounds=60, seed=seed)
        found.append(sequence.probability(0))
    assert statistics.mean(found) == pytest.approx(truth, abs=0.1)
    assert statistics.stdev(found) < 0.1


@pytest.mark.parametrize("truth", [0.05, 0.95])
def test_later_sequences_begin_with_what_earlier_ones_saw(truth: float) -> None:
    acceptance = Acceptance([0.6])
    for seed in range(6):
        learn_rounds(acceptance.sequence(), truth, rounds=20, seed=seed)
    assert acceptance.sequence().probability(0) == pytest.approx(truth, abs=0.12)


def test_what_is_learnt_of_one_kind_is_believed_of_the_others_in_the_same_sequence_only() -> None:
    acceptance = Acceptance([0.6, 0.6])
    sequence = acceptance.sequence()
    learn_rounds(sequence, 0.0, rounds=5, kind=0)
    assert sequence.probability(1) < 0.35
    assert acceptance.sequence().probability(1) == pytest.approx(0.6)


def test_only_proposals_up_to_the_first_rejection_are_tests() -> None:
    one, other = Acceptance([0.5]).sequence(), Acceptance([0.5]).sequence()
    one.learn([0, 0, 0, 0, 0], 1)
    other.learn([0, 0], 1)
    assert one.probability(0) == other.probability(0)


def test_now_and_then_a_sequence_starts_from_the_prior_again() -> None:
    acceptance = Acceptance([0.7])
    learn_rounds(acceptance.sequence(), 0.0, rounds=100)
    beginnings = [acceptance.sequence().probability(0) for _ in range(OPTIMISTS)]
    assert sum(beginning == pytest.approx(0.7) for beginning in beginnings) == 1
    assert sorted(beginnings)[-2] < 0.1
