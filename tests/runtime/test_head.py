"""A trained draft head at run time: whatever it proposes, tokens are the target's, and it proposes what it should.

Lookup-table heads say something else as soon as one feature, slot or place is not what it should be.
"""

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun import BackendError, Decoder, Request, RequestError
from forerun.head import HeadDraft
from forerun.invariants import violations
from forerun.oracle import law_of, plain_law
from forerun.planning import PLAIN, Choice
from forerun.row import Row
from helpers.joint_law import p_value
from helpers.random_plans import plan_at_random
from helpers.reference import decoded
from helpers.table_heads import head_of
from helpers.table_models import TablePair, engine_directory, random_model, table_pair

LONG = 300
PROMPTS = [[1, 2], [3] * 9, [1, 2, 3, 1, 2, 3, 1], [5, 0, 7], list(range(8)) * 5]
SIGNIFICANCE = 1e-3


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TablePair]:
    """Heads that are right always, mostly and never, each with the same target."""
    folder = tmp_path_factory.mktemp("pairs")
    return {name: table_pair(folder / name, draft=name, head=True) for name in ("equal", "good", "contrary")}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("long") / "engines", draft="equal", head=True, context=2 * LONG)


@pytest.fixture
def decoder(pairs: dict[str, TablePair]) -> Iterator[Decoder]:
    with pairs["good"].open() as decoder:
        yield decoder


def add(decoder: Decoder, *requests: Request) -> list[Row]:
    rows = [decoder._rows(request)[0] for request in requests]
    decoder._add(rows)
    return rows


def choose(decoder: Decoder, choices: Sequence[Choice]) -> None:
    """Plan these choices, row by row, from now on."""
    planner = plan_at_random(decoder, seed=0)
    planner._choice = lambda index, row: choices[index]  # type: ignore[method-assign]


@pytest.mark.parametrize("draft_length", [1, 3, 8])
@pytest.mark.parametrize("name", ["equal", "good", "contrary"])
def test_tokens_are_those_of_plain_decoding(pairs: dict[str, TablePair], name: str, draft_length: int) -> None:
    controls: list[dict[str, Any]] = [{}, {"temperature": 1.0, "law": "coupled", "seed": 4}]
    with pairs[name].open() as decoder:
        for prompt, more in itertools.product([*PROMPTS[:2], [4]], controls):
            plain = decoder.generate(prompt, max_new_tokens=16, draft="none", **more)
            found = decoder.generate(prompt, max_new_tokens=16, draft="model", draft_length=draft_length, **more)
            assert found.token_ids == plain.token_ids


@pytest.mark.parametrize("law", ["residual", "block"])
@pytest.mark.parametrize("draft_length", [1, 3, 8])
def test_sampled_tokens_are_exactly_those_that_the_head_s_law_and_the_seed_decide(
    pairs: dict[str, TablePair], law: str, draft_length: int
) -> None:
    """The reference knows the law that the head should have: a wrong feature anywhere would change what is said."""
    pair = pairs["good"]
    requests = [
        Request.of(prompt, law=law, temperature=1.0, seed=seed, draft_length=draft_length, max_new_tokens=18)
        for seed, prompt in enumerate(PROMPTS)
    ]
    with pair.open() as decoder:
        alone = [decoder.generate(request).token_ids for request in requests]
        together = [one.token_ids for one in decoder.generate(requests)]
    assert alone == together == [decoded(pair.target, pair.draft, request) for request in requests]


def test_a_head_that_is_always_right_has_every_proposal_accepted(pairs: dict[str, TablePair]) -> None:
    with pairs["equal"].open() as decoder:
        for prompt, draft_length in itertools.product(PROMPTS[1:], (1, 8)):
            stats = decoder.generate(prompt, max_new_tokens=24, draft="model", draft_length=draft_length).stats
            assert stats.proposed == stats.accepted > 0


def test_a_head_that_is_never_right_has_none_accepted(pairs: dict[str, TablePair]) -> None:
    with pairs["contrary"].open() as decoder:
        for prompt in PROMPTS:
            stats = decoder.generate(prompt, max_new_tokens=16, draft="model", draft_length=3).stats
            assert stats.proposed > stats.accepted == 0


@pytest.mark.parametrize("law", ["residual", "block"])
def test_sampled_tokens_have_the_joint_law_of_the_target(tmp_path: Path, law: str) -> None:
    target = random_model(21, vocabulary=4, context=12, spread=1.0)
    head = head_of(random_model(22, vocabulary=4, context=12, spread=1.0))
    prompt, rows = [1, 2, 3], 800
    with forerun.open(engine_directory(tmp_path / "engines", target, head, batch=500)) as decoder:
        controls = {"temperature": 1.0, "law": law, "draft": "model", "draft_length": 3, "max_new_tokens": 4}
        found = decoder.generate([Request.of(prompt, **controls) for _ in range(rows)])
    counts = Counter(one.token_ids[:3] for one in found)
    exact = plain_law(lambda context: law_of(target.logits(context), 1.0), positions=3, context=tuple(prompt))
    assert p_value(counts, exact) > SIGNIFICANCE


@pytest.mark.parametrize("seed", range(3))
def test_every_step_of_any_plan_leaves_caches_and_counts_sound(decoder: Decoder, seed: int) -> None:
    """Rows that come and go, are asked or not, beside others: what is in the caches is what should be there."""
    plan_at_random(decoder, seed=seed)
    rows = add(
        decoder,
        *(
            Request.of(prompt, max_new_tokens=tokens, temperature=temperature, draft=draft)
            for prompt, tokens, temperature, draft in [
                ([1, 2, 1, 2], 9, 0.0, "auto"),
                ([3], 30, 1.0, "auto"),
                ([1, 2, 1, 2], 20, 1.0, "ngram"),
                ([5] * 12, 25, 0.0, "model"),
                ([6, 0, 1], 25, 0.0, "none"),
            ]
        ),
    )
    while any(row.active for row in rows):
        decoder.scheduler.step()
        assert violations(decoder) == []
    assert all(row.finished() for row in rows)


def test_what_is_cached_for_good_does_not_depend_on_what_was_accepted(pairs: dict[str, TablePair]) -> None:
    """Entries on the head's own output are computed again from the target's features."""
    for pair in pairs.values():
        with pair.open() as decoder:
            (row,) = add(decoder, Request.of([1, 2, 3], max_new_tokens=40, draft="model", draft_length=4))
            assert isinstance(decoder.draft, HeadDraft)
            before = len(row.tokens)
            for _ in range(5):
                decoder.scheduler.step()
                assert decoder.draft.cached(0) == before - 1
                assert violations(decoder) == []
                before = len(row.tokens)


def test_a_slot_that_holds_something_else_is_a_violation(decoder: Decoder) -> None:
    add(decoder, Request.of([1, 2, 3, 4, 5], max_new_tokens=40, draft="model", draft_length=4))
    decoder.scheduler.step()
    assert decoder.draft is not None
    for cache, name in ((decoder.draft.model.cache, "draft"), (decoder.target.cache, "target")):
        tensor = list(cache.tensors(0, 1))[-1][2].view(1, offset=4)
        (value,) = decoder.backend.read_floats(tensor)
        decoder.backend.write(tensor, [value + 1])
        assert any(f"{name} cache: slots" in fault for fault in violations(decoder))
        decoder.backend.write(tensor, [value])
    assert violations(decoder) == []


def test_a_head_that_was_not_asked_for_long_catches_up_exactly(long: TablePair) -> None:
    with long.open() as decoder:
        (row,) = add(decoder, Request.of([1, 2, 3], max_new_tokens=LONG))
        for gap in (1, 2, 8, 9, 10, 40, 140):
            choose(decoder, [PLAIN])
            for _ in range(gap):
                decoder.scheduler.step()
            accepted = row.stats.accepted
            choose(decoder, [Choice("model", 4)])
            decoder.scheduler.step()
            assert row.stats.accepted == accepted + 4
            assert violations(decoder) == []


@pytest.mark.parametrize("length", [129, 130, 131, LONG])
def test_prompts_read_in_chunks_leave_the_features_that_the_head_wants(long: TablePair, length: int) -> None:
    prompt = [token * token % 8 for token in range(length)]
    with long.open() as decoder:
        stats = decoder.generate(prompt, max_new_tokens=20, draft="model", draft_length=4).stats
        assert stats.proposed == stats.accepted > 0


def test_rows_of_one_batch_may_lack_any_number_of_entries(long: TablePair) -> None:
    """One has just begun, one was never asked, one fell behind a little, one is asked every round."""
    with long.open() as decoder:
        prompts = [[1, 2, 3], [4, 5] * 70, [6, 7, 1], [2, 2, 2, 2]]
        rows = add(decoder, *(Request.of(prompt, max_new_tokens=80) for prompt in prompts))
        model = Choice("model", 3)
        choose(decoder, [PLAIN, PLAIN, model, model])
        for _ in range(4):
            decoder.scheduler.step()
        for choices in ([model, PLAIN, PLAIN, model], [PLAIN, Choice("model", 5), PLAIN, model], [model] * 4):
            choose(decoder, choices)
            before = [row.stats.accepted for row in rows]
            decoder.scheduler.step()
            gained = [row.stats.accepted - count for row, count in zip(rows, before, strict=True)]
            assert gained == [choice.length for choice in choices]
            assert violations(decoder) == []


def test_a_sequence_of_one_token_is_not_asked_and_its_neighbours_are(pairs: dict[str, TablePair]) -> None:
    with pairs["equal"].open() as decoder:
        one, other = add(
            decoder, *(Request.of(p, max_new_tokens=20, draft="model", draft_length=4) for p in ([3], [3, 1]))
        )
        decoder.scheduler.step()
        assert (one.stats.proposed, other.stats.proposed, other.stats.accepted) == (0, 4, 4)
        decoder.scheduler.step()
        assert (one.stats.proposed, one.stats.accepted) == (4, 4)
        assert violations(decoder) == []


@pytest.mark.parametrize("new", [1, 2, 3, 9])
def test_at_the_context_s_end_the_last_tokens_are_those_of_plain_decoding(
    pairs: dict[str, TablePair], new: int
) -> None:
    with pairs["equal"].open() as decoder:
        prompt = [token % 8 for token in range(decoder.manifest.limits.context - new)]
        plain = decoder.generate(prompt, max_new_tokens=99, draft="none").token_ids
        found = decoder.generate(prompt, max_new_tokens=99, draft="model", draft_length=8)
        assert found.token_ids == plain
        assert len(plain) == new


@pytest.mark.parametrize("left", range(3))
def test_a_row_that_is_cancelled_changes_no_other(pairs: dict[str, TablePair], left: int) -> None:
    requests = [
        Request.of([1, 2, 3], max_new_tokens=20, temperature=1.0, law="residual", seed=2, draft_length=3),
        Request.of([4, 4], max_new_tokens=20, temperature=1.0, law="block", seed=3, draft_length=5),
        Request.of([7, 1, 7, 1, 7], max_new_tokens=20, draft="model", draft_length=2),
    ]
    pair = pairs["good"]
    solo = [decoded(pair.target, pair.draft, request) for request in requests]
    with pair.open() as decoder:
        rows = add(decoder, *requests)
        for _ in range(2):
            decoder.scheduler.step()
        rows[left].cancel()
        while any(row.active for row in rows):
            decoder.scheduler.step()
            assert violations(decoder) == []
        others = [index for index in range(3) if index != left]
        assert all(rows[index].finished() for index in others)
        assert [tuple(rows[index].tokens[rows[index].prompt_tokens :]) for index in others] == [solo[i] for i in others]


def test_a_failing_call_ends_its_batch_and_leaves_the_decoder_usable(decoder: Decoder) -> None:
    plain = decoder.generate([1, 2, 3], max_new_tokens=12, draft="none").token_ids
    model, failing = decoder.draft.model, True  # type: ignore[union-attr]
    run = model.run

    def fail(*arguments: Any) -> None:
        if failing:
            raise BackendError("the device is gone; try again")
        run(*arguments)

    model.run = fail  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="gone"):
        decoder.generate([1, 2, 3], max_new_tokens=12, draft="model", draft_length=3)
    failing = False
    assert decoder.generate([1, 2, 3], max_new_tokens=12, draft="model", draft_length=3).token_ids == plain
    assert decoder.scheduler.rows == []


def test_an_interrupted_round_can_be_taken_again(pairs: dict[str, TablePair]) -> None:
    pair = pairs["good"]
    request = Request.of([1, 2, 3], max_new_tokens=20, temperature=1.0, law="residual", seed=2, draft_length=3)
    with pair.open() as decoder:
        (row,) = add(decoder, request)
        run, calls = decoder.target.run, itertools.count()

        def interrupted(*arguments: Any) -> None:
            if next(calls) % 2:
                raise KeyboardInterrupt
            run(*arguments)

        decoder.target.run = interrupted  # type: ignore[method-assign]
        while row.active:
            try:
                decoder.scheduler.step()
            except KeyboardInterrupt:
                assert violations_without_running(decoder) == []
        assert tuple(row.tokens[3:]) == decoded(pair.target, pair.draft, request)


def violations_without_running(decoder: Decoder) -> list[str]:
    """No more entries than tokens with features."""
    assert decoder.draft is not None
    return [
        str(row) for index, row in enumerate(decoder.scheduler.rows) if decoder.draft.cached(index) >= len(row.tokens)
    ]


def test_memory_of_ended_rows_is_given_back_and_no_binding_keeps_it(long: TablePair) -> None:
    with long.open() as decoder:
        many = [Request.of([token] * 280, max_new_tokens=8, draft="model", draft_length=3) for token in range(8)]
        expected = [one.token_ids for one in decoder.generate(many[:2])]
        wide = add(decoder, *many)
        decoder.scheduler.step()
        assert decoder.draft is not None
        models = (decoder.draft.model, decoder.target)
        memory = [weakref.ref(tensor.owner) for model in models for _, _, tensor in model.cache.tensors(0, 8)]
        for row in wide:
            row.cancel()
        (row,) = add(decoder, Request.of([1, 2, 3], max_new_tokens=30, draft="model", draft_length=3))
        for _ in range(3):
            decoder.scheduler.step()
            assert violations(decoder) == []
        assert [(model.cache.rows, model.cache.capacity) for model in models] == [(1, 256)] * 2
        gc.collect()
        assert [reference() for reference in memory] == [None] * len(memory)
        row.cancel()
        assert [one.token_ids for one in decoder.generate(many[:2])] == expected


def test_penalties_are_applied_at_every_place_of_a_drafted_run(pairs: dict[str, TablePair]) -> None:
    controls: dict[str, Any] = {"frequency_penalty": 1.5, "no_repeat_ngram": 2, "max_new_tokens": 20}
    with pairs["good"].open() as decoder:
        for prompt in PROMPTS:
            plain = decoder.generate(prompt, draft="none", **controls)
            found = decoder.generate(prompt, draft="model", draft_length=4, **controls)
            assert found.token_ids == plain.token_ids


def test_acceptance_is_learnt_step_by_step(pairs: dict[str, TablePair]) -> None:
    with pairs["contrary"].open() as decoder:
        add(decoder, Request.of([1, 2, 3], max_new_tokens=40, draft="model", draft_length=4))
        assert isinstance(decoder.draft, HeadDraft)
        decoder.scheduler.step()
        known = decoder.draft._acceptance.sequence()  # the first was an optimist, who keeps to the priors
        before = [known.probability(step) for step in range(4)]
        for _ in range(4):
            decoder.scheduler.step()
        after = [known.probability(step) for step in range(4)]
        assert after[0] < before[0]
        assert after[1:] == before[1:], "steps behind a rejection were not tested"


def test_the_planner_weighs_the_head_by_what_its_calls_take(decoder: Decoder) -> None:
    costs = decoder.costs
    assert costs.draft is not None
    assert costs.draft.tokens == costs.target.tokens
    found = decoder.generate([1, 2, 3], max_new_tokens=30)
    assert found.token_ids == decoder.generate([1, 2, 3], max_new_tokens=30, draft="none").token_ids


def test_without_its_head_a_target_that_keeps_features_decodes_plainly(pairs: dict[str, TablePair]) -> None:
    with pairs["good"].open() as decoder:
        plain = decoder.generate([1, 2, 3], max_new_tokens=20, draft="none").token_ids
    with forerun.open(pairs["good"].path, load_draft=False) as decoder:
        assert decoder.generate([1, 2, 3], max_new_tokens=20).token_ids == plain
        with pytest.raises(RequestError, match="draft model"):
            decoder.generate([1, 2, 3], draft="model")
