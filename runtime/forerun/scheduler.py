"""Which sequence is in which row of the batch. A step is three calls: admit, decode a round, release."""

from __future__ import annotations

import time
from collections import deque

from forerun.errors import BackendError, ForerunError, RequestError
from forerun.loop import Loop
from forerun.row import Row, Verdict


class Scheduler:
    """Sequences that wait, and those in rows 0 .. n-1 of the batch.

    Rows stay packed: when one ends, the last takes its place, so that finished rows cost nothing.
    """

    def __init__(self, loop: Loop, *, max_rows: int) -> None:
        self._loop = loop
        self.max_rows = max_rows
        self._waiting: deque[Row] = deque()
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Put a sequence in line."""
        self._waiting.append(row)

    def close(self) -> None:
        """End every sequence, those in line too, and let go of their memory."""
        for row in (*self._waiting, *self.rows):
            row.cancel()
        self._waiting.clear()
        self.rows.clear()
        self._loop.release()

    def step(self) -> None:
        """Admit what fits, decode one round, release what has ended.

        An interrupted step can be taken again: nothing counts before a row commits. A row that fails at its prompt
        fails alone; a failing engine call ends every row of the batch with its error, raised by no one but the
        rows' own readers.
        """
        self._release_ended()
        self._admit()
        try:
            self._decode()
        except Exception as error:
            for row in self.rows:
                row.error = row.error or error
        self._release_ended()
        if not self._waiting:
            self._loop.trim(self.rows)

    def _admit(self) -> None:
        while self._waiting and len(self.rows) < self.max_rows:
            row = self._waiting[0]
            if row.active and self._begin(row):  # one cancelled in line is dropped
                # Python runs signal handlers after calls, and none is made before the next line has taken effect:
                # an interrupt finds the row in line or in the batch.
                self.rows += [row]
            self._waiting.popleft()

    def _begin(self, row: Row) -> bool:
        # In powers of two: making room for one more row moves all of them, and sequences often come one by one.
        room = 1 << (len(self.rows) + len(self._waiting) - 1).bit_length()
        started = time.perf_counter()
        try:
            self._loop.begin(len(self.rows), row, rows=min(self.max_rows, room))
        except Exception as error:
            row.error = error
            return False
        row.stats.prefill_s = time.perf_counter() - started
        return True

    def _decode(self) -> None:
        if not self.rows:
            return
        backend, started = self._loop.backend, time.perf_counter()
        engine_s, host_bytes = backend.engine_s, backend.bytes_to_host
        for index, verdict in enumerate(self._loop.round(self.rows)):
            self._commit(index, verdict)
        for row in self.rows:
            row.stats.decode_s += time.perf_counter() - started
            row.stats.engine_s += backend.engine_s - engine_s
            row.stats.host_bytes += (backend.bytes_to_host - host_bytes) // len(self.rows)

    def _commit(self, index: int, verdict: Verdict) -> None:
        row = self.rows[index]
        try:
            if verdict.tokens:
                chunk = row.commit(verdict)
                self._loop.commit(index, row, chunk.token_ids, verdict)
        except BaseException as error:  # half committed: this row cannot go on, the others can
            row.error = error
            if not isinstance(error, Exception):
                raise
        if verdict.next_token < 0 and row.active:  # what was kept may have ended it, as in plain decoding
            row.error = _no_law(row)

    def _release_ended(self) -> None:
        for index in reversed(range(len(self.rows))):
            if not self.rows[index].active:
                self._release(index)

    def _release(self, index: int) -> None:
        last = len(self.rows) - 1
        self._loop.end(index, last, clear=self.rows[index].error is not None)
        self.rows[index] = self.rows[last]
        self.rows.pop()


def _no_law(row: Row) -> ForerunError:
    """Why a row's target gave logits that no token can be drawn from."""
    if row.edits is not None:
        return RequestError(
            f"row {row.number}: no token is left to choose from (or the target's logits are not finite); "
            "ban fewer tokens with bias, bad words, min_new_tokens or no_repeat_ngram"
        )
    return BackendError(
        f"row {row.number}: the target's logits are not finite (NaN or infinite); check its weights and this prompt"
    )
