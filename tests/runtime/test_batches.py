"""Rows of one batch: they come, end and move without touching each other."""

from collections import defaultdict
from pathlib import Path

import pytest

from forerun import Decoder, Request
from helpers.reference import greedy, sampled
from helpers.table_models import DRAFTS, TablePair, table_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines", batch=3)


def test_a_row_that_ends_in_round_one_leaves_the_other_as_it_is_alone(pair: TablePair) -> None:
    for short in range(2):
        requests = [Request.of([1 + row, 2], max_new_tokens=1 if row == short else 25) for row in range(2)]
        with pair.open() as decoder:
            together = decoder.generate(requests)
        with pair.open() as decoder:
            alone = [decoder.generate(request) for request in requests]
        assert [one.token_ids for one in together] == [one.token_ids for one in alone]
        assert together[short].stats.rounds == 1


def test_a_batch_larger_than_the_engines_maximum_waits_for_rows(pair: TablePair) -> None:
    prompts = [[row % 8, (row * 3) % 8] for row in range(20)]
    requests = [Request.of(prompt, max_new_tokens=1 + row % 7) for row, prompt in enumerate(prompts)]
    with pair.open() as decoder:
        generations = decoder.generate(requests)
        assert decoder.target.cache.rows == 3
    for row, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        assert generation.token_ids == greedy(pair.target, prompt, 1 + row % 7)


def test_sequences_that_come_one_by_one_move_the_cache_a_few_times_only(tmp_path: Path) -> None:
    pair = table_pair(tmp_path / "engines", batch=7)
    with pair.open() as decoder:
        streams, tokens = [], defaultdict[int, list[int]](list)
        for number in range(7):
            streams.append(decoder.stream([number], max_new_tokens=30, draft="none"))
            for place, stream in enumerate(streams):
                tokens[place] += next(stream).token_ids
        assert len(decoder.scheduler.rows) == 7
        assert decoder.target.cache.rows == 7
        assert decoder.target.cache.generation == 4  # for 1, 2, 4 and 7 rows
        for place, stream in enumerate(streams):
            tokens[place] += [token for chunk in stream for token in chunk.token_ids]
            assert tuple(tokens[place]) == greedy(pair.target, [place], 30)


def test_finished_rows_cost_nothing(pair: TablePair) -> None:
    requests = [Request.of([1], max_new_tokens=tokens, draft="none") for tokens in (2, 30, 5)]
    with pair.open() as decoder:
        rows = []
        step = decoder.scheduler.step
        decoder.scheduler.step = lambda: (rows.append(len(decoder.scheduler.rows)), step())[1]  # type: ignore[method-assign]
        decoder.generate(requests)
        assert rows == [0, 3, *[2] * 3, *[1] * 25]


def test_rows_of_very_different_lengths_share_rounds(tmp_path: Path) -> None:
    pair = table_pair(tmp_path / "engines", context=400)
    prompts = [[length % 8] * length for length in (1, 300, 7, 129, 2)]
    with pair.open() as decoder:
        generations = decoder.generate(prompts, max_new_tokens=40)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.token_ids == greedy(pair.target, prompt, 40)


def test_every_row_keeps_its_own_controls(pair: TablePair) -> None:
    batch = [
        Request.of([1, 2], max_new_tokens=12),
        Request.of([1, 2], max_new_tokens=15, temperature=1.0, seed=4, draft_length=2, law="residual"),
        Request.of([1, 2], max_new_tokens=9, draft="none"),
        Request.of([1, 2], max_new_tokens=20, temperature=0.5, seed=4, draft="none", law="residual"),
        Request.of([1, 2], max_new_tokens=20, stop="w{} w{}".format(*greedy(pair.target, [1, 2], 3)[1:])),
        Request.of([1, 2], max_new_tokens=3, temperature=1.0, seed=5, draft_length=8, law="residual"),
    ]
    with pair.open() as decoder:
        generations = decoder.generate(batch)
    target, draft = pair.target, pair.draft
    expected = [
        greedy(target, [1, 2], 12),
        sampled(target, draft, [1, 2], 15, temperature=1.0, seed=4, draft_length=2),
        greedy(target, [1, 2], 9),
        sampled(target, draft, [1, 2], 20, temperature=0.5, seed=4, draft_length=0),
        greedy(target, [1, 2], 3),
        sampled(target, draft, [1, 2], 3, temperature=1.0, seed=5, draft_length=8),
    ]
    assert [one.token_ids for one in generations] == expected
    assert [one.finish_reason for one in generations] == ["length"] * 4 + ["stop", "length"]
    assert [one.stats.draft for one in generations] == ["model+ngram", "model", "none", "none", "model+ngram", "model"]
    assert [one.stats.law for one in generations] == [
        "greedy",
        "residual",
        "greedy",
        "residual",
        "greedy",
        "residual",
    ]


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_row_that_joins_later_finds_rows_of_any_kind(tmp_path: Path, draft: str) -> None:
    pair = table_pair(tmp_path / "engines", draft=draft)
    requests = [
        Request.of([1], max_new_tokens=2),
        Request.of([2, 3], max_new_tokens=9, draft="none"),
        Request.of([4], max_new_tokens=30, temperature=1.0, seed=1),
        Request.of([5, 6, 7], max_new_tokens=1),
    ]
    alone = [_solo(pair, request) for request in requests]
    for first in range(len(requests)):
        for second in range(len(requests)):
            with pair.open() as decoder:
                assert _staggered(decoder, requests[first], requests[second]) == [alone[first], alone[second]]


def _solo(pair: TablePair, request: Request) -> list[int]:
    with pair.open() as decoder:
        return list(decoder.generate(request).token_ids)


def _staggered(decoder: Decoder, first: Request, second: Request) -> list[list[int]]:
    """The tokens of both, where the second comes after the first one's first round."""
    leading = decoder.stream(first)
    tokens = [list(next(leading).token_ids), list(decoder.generate(second).token_ids)]
    tokens[0] += [token for chunk in leading for token in chunk.token_ids]
    return tokens


def test_the_order_of_a_batch_is_the_order_of_its_generations(pair: TablePair) -> None:
    prompts = [[row] for row in range(8)]
    with pair.open() as decoder:
        generations = decoder.generate(prompts, max_new_tokens=5)
    assert [one.token_ids for one in generations] == [greedy(pair.target, prompt, 5) for prompt in prompts]
    assert [one.prompt_tokens for one in generations] == [1] * 8
