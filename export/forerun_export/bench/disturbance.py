"""How much of the machine others took while engines were measured (Linux; None elsewhere)."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # the columns idle and iowait of /proc/stat
_GUEST = 8  # from here on time that is counted in the columns before it


class Disturbance:
    """Counts processor time from its making on; `own` are the processes that may take it, beside this one."""

    def __init__(self, own: Sequence[int]) -> None:
        self._own = [os.getpid(), *own]
        self._began = time.perf_counter()
        self._before = self._others_s()

    def share(self) -> float | None:
        """The share of all processors that went to other processes, or that the host of this machine took."""
        after = self._others_s()
        if self._before is None or after is None:
            return None
        taken = (after - self._before) / (time.perf_counter() - self._began) / (os.cpu_count() or 1)
        return min(1.0, max(0.0, taken))

    def _others_s(self) -> float | None:
        try:
            columns = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        except (OSError, ValueError):
            return None
        busy = sum(ticks for place, ticks in enumerate(columns[:_GUEST]) if place not in _IDLE)
        return (busy - sum(map(_ticks, self._own))) * _TICK_S


def _ticks(process: int) -> int:
    """Of a process in its own code and in the kernel's; 0 for one that is gone."""
    try:
        _, _, columns = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    except OSError:
        return 0
    user, kernel = columns.split()[11:13]
    return int(user) + int(kernel)
