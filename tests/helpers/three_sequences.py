"""Three sequences of different kinds that tests decode together, and what each of them says alone."""

from collections.abc import Iterator

from forerun import Chunk, Decoder, Request
from forerun.invariants import violations
from forerun.row import Row

REQUESTS = [
    Request.of([1, 2, 3], max_new_tokens=14, draft_length=3),
    Request.of([4], max_new_tokens=18, temperature=1.0, seed=6, draft_length=3),
    Request.of([5, 6], max_new_tokens=11, draft="none"),
]


def rest(stream: Iterator[Chunk]) -> list[int]:
    """The tokens that are still to come."""
    return [token for chunk in stream for token in chunk.token_ids]


def check_usable(decoder: Decoder, solo: list[tuple[int, ...]]) -> None:
    """The decoder is sound, says what it should, and has let go of everything."""
    assert violations(decoder) == []
    assert [one.token_ids for one in decoder.generate(REQUESTS)] == solo
    assert decoder.scheduler.rows == []


def add_without_driving(decoder: Decoder, request: Request) -> Row:
    """Put a sequence in line, as another thread would that does not get to run."""
    row = decoder._rows(request)[0]
    decoder._add([row])
    return row


def drive(decoder: Decoder, row: Row) -> None:
    """Decode until this sequence ends."""
    for _ in range(100):
        if row.finished():
            return
        decoder._step(row)
        row.chunks.clear()
    raise AssertionError("the sequence is lost")
