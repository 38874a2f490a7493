"""Whatever ends a sequence, and at whatever point: the others, and those to come, are as if it had ended by itself."""

import gc
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import forerun
from forerun import BackendError, Decoder, Request, RequestError
from forerun.invariants import violations
from forerun.row import Row
from helpers.hooked_backend import HookedBackend, RaiseAt, open_hooked
from helpers.table_models import TablePair, table_pair

pytestmark = pytest.mark.timeout(120)  # a sequence that is lost would be waited for without end

REQUESTS = [
    Request.of([1, 2, 3], max_new_tokens=14, draft_length=3),
    Request.of([4], max_new_tokens=18, temperature=1.0, seed=6, draft_length=3),
    Request.of([5, 6], max_new_tokens=11, draft="none"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines", batch=4)


@pytest.fixture(scope="module")
def solo(pair: TablePair) -> list[tuple[int, ...]]:
    """What each of REQUESTS says alone."""
    with pair.open() as decoder:
        return [decoder.generate(request).token_ids for request in REQUESTS]


@pytest.fixture
def hooked(pair: TablePair) -> Iterator[tuple[Decoder, HookedBackend]]:
    decoder, backend = open_hooked(pair.path)
    with decoder:
        yield decoder, backend


def rest(stream: Iterator[forerun.Chunk]) -> list[int]:
    return [token for chunk in stream for token in chunk.token_ids]


def read_into(said: list[int], stream: Iterator[forerun.Chunk]) -> None:
    for chunk in stream:
        said += chunk.token_ids


def check_usable(decoder: Decoder, solo: list[tuple[int, ...]]) -> None:
    assert violations(decoder) == []
    assert [one.token_ids for one in decoder.generate(REQUESTS)] == solo
    assert decoder.scheduler.rows == []


# Leaving


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
        waiting = _add_without_driving(decoder, REQUESTS[1])
        waiting.cancel()
        assert tuple(said + rest(running)) == alone
        assert decoder.generate(REQUESTS[0]).token_ids == alone
        assert waiting.stats.rounds == 0


# Threads


def test_threads_share_batches_and_say_what_they_say_alone(
    pair: TablePair, solo: list[tuple[int, ...]]
) -> None:
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


# Interrupts


SHORT = [
    Request.of([1, 2, 3], max_new_tokens=7, draft_length=3),
    Request.of([4], max_new_tokens=9, temperature=1.0, seed=6, draft_length=2),
    Request.of([5, 6], max_new_tokens=5, draft="none"),
]


def stream_together(decoder: Decoder) -> tuple[list[list[int]], list[int]]:
    """Stream SHORT in turn: what each has said, and which were ended by an interrupt."""
    streams = [decoder.stream(request) for request in SHORT]
    said: list[list[int]] = [[] for _ in SHORT]
    interrupted: list[int] = []
    for read in (lambda stream: next(stream).token_ids, rest):
        for row in [row for row in range(len(SHORT)) if row not in interrupted]:
            try:
                said[row] += read(streams[row])
            except KeyboardInterrupt:
                interrupted.append(row)
    return said, interrupted


@pytest.mark.parametrize("fresh", [False, True])
def test_an_interrupt_at_any_operation_ends_the_interrupted_call_alone(pair: TablePair, fresh: bool) -> None:
    decoder, backend = open_hooked(pair.path)
    undisturbed, _ = stream_together(decoder)
    # A fresh decoder allocates, grows and binds for the first time; it takes a while to open: fewer points are tried.
    for number in itertools.count(step=13 if fresh else 1):
        if fresh:
            decoder, backend = open_hooked(pair.path)
        backend.hook = RaiseAt(number, KeyboardInterrupt())
        said, interrupted = stream_together(decoder)
        assert violations(decoder) == []
        if not interrupted:
            break
        assert len(interrupted) == 1, f"operation {number}"
        others = [row for row in range(len(SHORT)) if row not in interrupted]
        assert [said[row] for row in others] == [undisturbed[row] for row in others], f"operation {number}"
    assert number > 150
    backend.hook = None
    assert stream_together(decoder) == (undisturbed, [])


def test_a_decoder_is_sound_right_after_an_interrupt(hooked: tuple[Decoder, HookedBackend]) -> None:
    decoder, backend = hooked
    stream_together(decoder)
    for number in range(0, 60, 3):
        staying, interrupted = decoder.stream(SHORT[0]), decoder.stream(SHORT[1])
        next(staying)
        backend.hook = RaiseAt(number, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            rest(interrupted)
        assert violations(decoder) == []
        staying.close()


def test_an_interrupt_of_one_sequence_loses_no_other_that_is_just_being_admitted(
    hooked: tuple[Decoder, HookedBackend], solo: list[tuple[int, ...]]
) -> None:
    decoder, backend = hooked
    for number in range(20):  # from the first operation of the other's prompt into the round behind it
        driving = decoder.stream(REQUESTS[1])
        next(driving)
        row = _add_without_driving(decoder, REQUESTS[0])
        backend.hook = RaiseAt(number, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            next(driving)
        _drive(decoder, row)
        assert tuple(row.tokens[row.prompt_tokens :]) == solo[0]
    check_usable(decoder, solo)


def _drive(decoder: Decoder, row: Row) -> None:
    for _ in range(100):
        if row.finished():
            return
        decoder._step(row)
        row.chunks.clear()
    raise AssertionError("the sequence is lost")


def _add_without_driving(decoder: Decoder, request: Request) -> Row:
    row = decoder._row(request)
    decoder._add([row])
    return row


# Failures


@pytest.mark.parametrize("operation", ["call", "write", "read"])
def test_a_failing_engine_ends_the_rows_of_its_batch_and_the_decoder_goes_on(
    hooked: tuple[Decoder, HookedBackend], solo: list[tuple[int, ...]], operation: str
) -> None:
    decoder, backend = hooked
    streams = [decoder.stream(request) for request in REQUESTS]
    said = [list(next(stream).token_ids) for stream in streams]
    backend.hook = RaiseAt(2, BackendError("the device is gone"), operation=operation)
    for row, stream in enumerate(streams):
        with pytest.raises(BackendError, match="the device is gone"):
            read_into(said[row], stream)
        assert tuple(said[row]) == solo[row][: len(said[row])]  # what was emitted before stays right
    check_usable(decoder, solo)


def test_a_row_that_fails_at_its_prompt_fails_alone(
    hooked: tuple[Decoder, HookedBackend], solo: list[tuple[int, ...]]
) -> None:
    decoder, backend = hooked
    running = decoder.stream(REQUESTS[1])
    said = list(next(running).token_ids)
    backend.hook = RaiseAt(0, BackendError("no memory"), operation="allocate")
    with pytest.raises(BackendError, match="no memory"):
        decoder.generate(REQUESTS[0])
    assert tuple(said + rest(running)) == solo[1]
    check_usable(decoder, solo)


def test_no_memory_for_a_larger_cache_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    pair = table_pair(tmp_path / "engines", context=600)
    decoder, backend = open_hooked(pair.path)
    with decoder:
        alone = decoder.generate([1, 2], max_new_tokens=9).token_ids
        backend.hook = RaiseAt(0, BackendError("no memory"), operation="allocate")
        with pytest.raises(BackendError, match="no memory"):
            decoder.generate([3] * 400)
        assert decoder.target.cache.capacity == 256
        assert decoder.generate([1, 2], max_new_tokens=9).token_ids == alone


def test_a_row_that_fails_while_it_commits_fails_alone(
    pair: TablePair, solo: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Row.commit

    def broken(row: Row, verdict: object) -> object:
        if row.prompt_tokens == len(REQUESTS[0].prompt):
            raise ValueError("no such token text")
        return commit(row, verdict)  # type: ignore[arg-type]

    with pair.open() as decoder:
        streams = [decoder.stream(request) for request in REQUESTS]
        rows = [_add_without_driving(decoder, request) for request in REQUESTS[1:]]
        with monkeypatch.context() as patched:
            patched.setattr(Row, "commit", broken)
            with pytest.raises(ValueError, match="no such token text"):
                rest(streams[0])
        for row, expected in zip(rows, solo[1:], strict=True):
            _drive(decoder, row)
            assert tuple(row.tokens[row.prompt_tokens :]) == expected
        check_usable(decoder, solo)


def test_an_invalid_request_in_a_batch_is_refused_before_any_work(
    hooked: tuple[Decoder, HookedBackend], solo: list[tuple[int, ...]]
) -> None:
    decoder, backend = hooked
    backend.hook = RaiseAt(0, AssertionError("work was done"))
    with pytest.raises(RequestError):
        decoder.generate([REQUESTS[0], Request.of([1, 99])])
    backend.hook = None
    check_usable(decoder, solo)


# Closing


def test_closing_ends_running_and_waiting_sequences_and_says_so(tmp_path: Path) -> None:
    decoder = table_pair(tmp_path / "engines", batch=1).open()
    running = decoder.stream(REQUESTS[0])
    next(running)
    waiting = _add_without_driving(decoder, REQUESTS[1])
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
