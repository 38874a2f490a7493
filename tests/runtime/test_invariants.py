"""The checker of live decoders: silent on a sound one, and loud about every kind of damage."""

import random
import re
from collections.abc import Callable, Iterator

import pytest

from forerun import Decoder, Request
from forerun.cache import KeyValueCache
from forerun.draft import ModelDraft
from forerun.invariants import violations
from helpers.table_models import DRAFTS, TablePair, table_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines", batch=3)


@pytest.fixture
def decoding(pair: TablePair) -> Iterator[Decoder]:
    """A decoder in the middle of two sequences; the second has no draft."""
    with pair.open() as decoder:
        requests = [
            Request.of([1, 2, 3], max_new_tokens=20, draft_length=4),
            Request.of([4, 5], max_new_tokens=20, draft="none"),
        ]
        decoder._add([decoder._rows(request)[0] for request in requests])
        for _ in range(3):
            decoder.scheduler.step()
        assert violations(decoder) == []
        yield decoder


def random_request(rng: random.Random, context: int) -> Request:
    return Request.of(
        [rng.randrange(8) for _ in range(rng.choice([1, 2, 5, 20]))],
        max_new_tokens=rng.choice([1, 2, 7, 30, context]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(2**64),
        draft=rng.choice(["auto", "auto", "model", "ngram", "none"]),
        draft_length=rng.choice([None, *range(9)]),
        law=rng.choice(["auto", "coupled", "block", "residual"]),
        stop=rng.choice([(), (), ("w3 w4", "w1 w")]),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("draft", DRAFTS)
def test_nothing_is_violated_after_any_step_of_random_runs(
    tmp_path_factory: pytest.TempPathFactory, draft: str, seed: int
) -> None:
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("runs") / "engines"
    with table_pair(folder, draft=draft, batch=3, end_tokens=[6]).open() as decoder:
        rows = [decoder._rows(random_request(rng, 64))[0] for _ in range(8)]
        coming = list(rows)
        while any(row.active for row in rows):
            if coming and rng.random() < 0.4:
                decoder._add([coming.pop()])
            if rng.random() < 0.05:
                rng.choice(rows).cancel()
            decoder.scheduler.step()
            assert violations(decoder) == []


def test_a_long_sequence_stays_sound_while_its_cache_grows(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("long") / "engines"
    with table_pair(folder, draft="equal", context=400).open() as decoder:
        decoder._add(decoder._rows(Request.of([1] * 240, max_new_tokens=40, draft_length=4)))
        while decoder.scheduler.step() or decoder.scheduler.rows:
            assert violations(decoder) == []
        assert decoder.target.cache.capacity == 512


def damage_slot(cache: KeyValueCache, decoder: Decoder, *, row: int, slot: int, name: str = "k_cache.0") -> None:
    tensor = next(tensor for found, _, tensor in cache.tensors(row, 1) if found == name)
    number = tensor.view(1, offset=(cache.capacity + slot) * tensor.shape[3] + 1)  # of head 1
    decoder.backend.write(number, [-0.0 if decoder.backend.read(number) == [0.0] else 0.0])


def draft_cache(decoder: Decoder) -> KeyValueCache:
    assert isinstance(decoder.draft, ModelDraft)
    return decoder.draft.model.cache


@pytest.mark.parametrize("name", ["k_cache.0", "v_cache.0"])
@pytest.mark.parametrize("slot", [0, 2, 3])
def test_a_slot_that_does_not_hold_its_token_is_named(decoding: Decoder, name: str, slot: int) -> None:
    damage_slot(decoding.target.cache, decoding, row=1, slot=slot, name=name)
    damage_slot(draft_cache(decoding), decoding, row=0, slot=slot, name=name)
    assert violations(decoding) == [
        f"row 1: target cache: slots {slot} do not hold the committed tokens",
        f"row 0: draft cache: slots {slot} do not hold the committed tokens",
    ]


def test_slots_that_no_one_sees_may_hold_anything(decoding: Decoder) -> None:
    row = decoding.scheduler.rows[0]
    damage_slot(decoding.target.cache, decoding, row=0, slot=len(row.tokens) - 1)
    damage_slot(draft_cache(decoding), decoding, row=0, slot=len(row.tokens) - 2)
    damage_slot(draft_cache(decoding), decoding, row=1, slot=0)  # a row without a draft
    assert violations(decoding) == []


def swap_rows(decoder: Decoder) -> None:
    decoder.scheduler.rows.reverse()


def shrink_caches(decoder: Decoder) -> None:
    decoder.target.cache.rows = 1


def grow_past_limit(decoder: Decoder) -> None:
    decoder.scheduler.rows[0].length_limit = 5


def change_text(decoder: Decoder) -> None:
    decoder.scheduler.rows[0].text = "w9" + decoder.scheduler.rows[0].text


def change_token(decoder: Decoder) -> None:
    decoder.scheduler.rows[1].tokens[-2] ^= 1


def double_a_row(decoder: Decoder) -> None:
    decoder.scheduler.rows.append(decoder.scheduler.rows[0])


def miscount(name: str, change: int) -> Callable[[Decoder], None]:
    def damage(decoder: Decoder) -> None:
        stats = decoder.scheduler.rows[0].stats
        setattr(stats, name, getattr(stats, name) + change)

    return damage


def swap_positions(decoder: Decoder) -> None:
    decoder.scheduler.rows[0].stats.accepted_by_position.reverse()


DAMAGES: dict[str, tuple[Callable[[Decoder], None], str]] = {
    "rows swapped": (swap_rows, "row 0: target cache: slots 0"),
    "a sequence in two rows": (double_a_row, "a sequence is in two rows"),
    "cache too small": (shrink_caches, "row 1: target cache: 1 rows of 256 slots, too few"),
    "past the limit": (grow_past_limit, "not ended at its limit of 5"),
    "another text": (change_text, "row 0: shows 'w9"),
    "another token": (change_token, "row 1: target cache: slots"),
    "emitted": (miscount("emitted", 1), "row 0: .* tokens emitted, .* counted"),
    "accepted": (miscount("accepted", 1), "accepted, .* by position"),
    "corrections": (miscount("corrections", 1), "emitted is not accepted [+] corrections"),
    "bonuses": (miscount("bonuses", -1), "emitted is not accepted [+] corrections"),
    "truncated": (miscount("truncated", 1), "truncated, though the sequence goes on"),
    "rounds": (miscount("rounds", 1), "rounds gave"),
    "proposed": (miscount("proposed", -100), "accepted of -?[0-9]+ proposed"),
    "positions": (swap_positions, "acceptance increases with the position"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_kind_of_damage_is_told(decoding: Decoder, damage: str) -> None:
    plant, expected = DAMAGES[damage]
    assert len(decoding.scheduler.rows[0].stats.accepted_by_position) > 1
    plant(decoding)
    assert [fault for fault in violations(decoding) if re.search(expected, fault)]


def test_all_violations_are_told_at_once(decoding: Decoder) -> None:
    for name in ("rows swapped", "rounds", "another text"):
        DAMAGES[name][0](decoding)
    assert len(violations(decoding)) >= 4


def test_more_rows_than_the_engines_take_are_told(decoding: Decoder) -> None:
    decoding.scheduler.rows.extend(decoding._rows(Request.of([1]))[0] for _ in range(2))
    assert any("4 rows, the engines take 3" in fault for fault in violations(decoding))


def test_checking_changes_nothing(decoding: Decoder, pair: TablePair) -> None:
    row = decoding.scheduler.rows[0]
    while row.active:
        assert violations(decoding) == []
        decoding.scheduler.step()
    with pair.open() as fresh:
        assert tuple(row.tokens[3:]) == fresh.generate([1, 2, 3], max_new_tokens=20).token_ids
