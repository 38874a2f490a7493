"""Leaving, sharing and closing: a sequence that ends early is, to all others, one that has ended by itself."""

import gc
import threading
from pathlib import Path

import pytest

from forerun import Decoder, RequestError
from forerun.invariants import violations
from helpers.table_models import TablePair, table_pair
from helpers.three_sequences import REQUESTS, add_without_driving, check_usable, rest

pytestmark = pytest.mark.timeout(120)  # a sequence that is lost would be waited for without end


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines", batch=4)


@pytest.fixture(scope="module")
def solo(pair: TablePair) -> list[tuple[int, ...]]:
    """What each of REQUESTS says alone."""
    with pair.open() as decoder:
        return [decoder.generate(request).token_ids for request in REQUESTS]


@pytest.mark.parametrize("left", range(3))
@pytest.mark.parametrize("after", range(4))
def test_a_stream_that_is_left_frees_its_row_and_changes_no_other(
    pair: TablePair, solo: list[tuple[int, ...]], left: int, after: int
) -> None:
    with pair.open() as decoder:
        streams = [decoder.stream(request) for request in REQUESTS]
        said = [list(next(stream).token_ids) for stream in streams]
        for _ in range(after):
            next(streams[left])
        streams[left].close()
        for row in range(3):
            if row != left:
                said[row] += rest(streams[row])
                assert tuple(said[row]) == solo[row]
                assert violations(decoder) == []
        check_usable(decoder, solo)


def test_a_stream_that_is_forgotten_is_left(pair: TablePair) -> None:
    with pair.open() as decoder:
        stream = decoder.stream(REQUESTS[0])
        next(stream)
        del stream
        gc.collect()
        decoder.generate([1], max_new_tokens=1)
        assert decoder.scheduler.rows == []


def test_a_stream_that_is_never_read_takes_no_row(pair: TablePair, solo: list[tuple[int, ...]]) -> None:
    with pair.open() as decoder:
        streams = [decoder.stream(REQUESTS[0]) for _ in range(20)]
        assert decoder.generate(REQUESTS[1]).token_ids == solo[1]
        streams[0].close()
        assert tuple(rest(streams[1])) == solo[0]


def test_streams_may_be_read_in_turn(pair: TablePair, solo: list[tuple[int, ...]]) -> None:
    with pair.open() as decoder:
        streams = {row: decoder.stream(request) for row, request in enumerate(REQUESTS)}
        said: dict[int, list[int]] = {row: [] for row in streams}
        while streams:
            for row in list(streams):
                if (chunk := next(streams[row], None)) is None:
                    del streams[row]
                else:
                    said[row] += chunk.token_ids
    assert [tuple(said[row]) for row in range(3)] == solo


def test_a_stream_returns_its_generation(pair: TablePair, solo: list[tuple[int, ...]]) -> None:
    with pair.open() as decoder:
        stream = decoder.stream(REQUESTS[0])
        texts = []
        while True:
            try:
                texts.append(next(stream).text)
            except StopIteration as end:
                generation = end.value
                break
        assert generation.token_ids == solo[0]
        assert generation.text == "".join(texts)


def test_a_sequence_may_be_left_while_it_waits_for_a_row(tmp_path: Path) -> None:
    pair = table_pair(tmp_path / "engines", batch=1)
    with pair.open() as decoder:
        alone = decoder.generate(REQUESTS[0]).token_ids
        running = decoder.stream(REQUESTS[0])
        said = list(next(running).token_ids)
        waiting = add_without_driving(decoder, REQUESTS[1])
        waiting.cancel()
        assert tuple(said + rest(running)) == alone
        assert decoder.generate(REQUESTS[0]).token_ids == alone
        assert waiting.stats.rounds == 0


# Threads


def test_threads_share_batches_and_say_what_they_say_alone(pair: TablePair, solo: list[tuple[int, ...]]) -> None:
    said: list[list[tuple[int, ...]]] = [[] for _ in REQUESTS]

    def work(row: int, decoder: Decoder) -> None:
        for turn in range(6):
            if turn % 2:
                said[row].append(decoder.generate(REQUESTS[row]).token_ids)
            else:
                said[row].append(tuple(rest(decoder.stream(REQUESTS[row]))))

    with pair.open() as decoder:
        threads = [threading.Thread(target=work, args=(row, decoder)) for row in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check_usable(decoder, solo)
    assert said == [[tokens] * 6 for tokens in solo]


# Closing


def test_closing_ends_running_and_waiting_sequences_and_says_so(tmp_path: Path) -> None:
    decoder = table_pair(tmp_path / "engines", batch=1).open()
    running = decoder.stream(REQUESTS[0])
    next(running)
    waiting = add_without_driving(decoder, REQUESTS[1])
    decoder.close()
    with pytest.raises(RequestError, match="cancelled because the decoder was closed; open it again"):
        rest(running)
    with pytest.raises(RequestError, match="cancelled because the decoder was closed"):
        waiting.finished()
    assert decoder.scheduler.rows == []


def test_a_closed_decoder_refuses_work_and_closes_twice(tmp_path: Path) -> None:
    with table_pair(tmp_path / "engines").open() as decoder:
        decoder.generate([1], max_new_tokens=1)
    decoder.close()
    with pytest.raises(RequestError, match="this decoder is closed; open the engine directory again"):
        decoder.generate([1])
    with pytest.raises(RequestError, match="this decoder is closed"):
        next(decoder.stream([1]))


def test_a_sequence_that_has_ended_before_closing_keeps_its_output(pair: TablePair) -> None:
    decoder = pair.open()
    stream = decoder.stream([1], max_new_tokens=1)
    first = next(stream)
    decoder.close()
    assert first.token_ids
    assert next(stream, None) is None
