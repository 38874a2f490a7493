"""Interrupts and failures at every point: they end what they hit, and nothing else."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun import BackendError, Chunk, Decoder, Request, RequestError
from forerun.invariants import violations
from forerun.row import Row
from helpers.hooked_backend import HookedBackend, RaiseAt, open_hooked
from helpers.table_models import TablePair, table_pair
from helpers.three_sequences import REQUESTS, add_without_driving, check_usable, drive, rest

pytestmark = pytest.mark.timeout(120)  # a sequence that is lost would be waited for without end


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


def read_into(said: list[int], stream: Iterator[Chunk]) -> None:
    for chunk in stream:
        said += chunk.token_ids


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
        row = add_without_driving(decoder, REQUESTS[0])
        backend.hook = RaiseAt(number, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            next(driving)
        drive(decoder, row)
        assert tuple(row.tokens[row.prompt_tokens :]) == solo[0]
    check_usable(decoder, solo)


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
        rows = [add_without_driving(decoder, request) for request in REQUESTS[1:]]
        with monkeypatch.context() as patched:
            patched.setattr(Row, "commit", broken)
            with pytest.raises(ValueError, match="no such token text"):
                rest(streams[0])
        for row, expected in zip(rows, solo[1:], strict=True):
            drive(decoder, row)
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
