"""What other processes take of the machine is seen; what the benchmark itself takes is not held against it."""

import subprocess
import sys
import time

import pytest

from forerun_export.bench.disturbance import Disturbance

BUSY = "while True: pass"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


def shares(seconds: float) -> tuple[float, float]:
    """With one busy process: what a count tells that takes it for another's, and one that takes it for its own."""
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        try:
            time.sleep(0.3)  # it has begun
            strange, own = Disturbance([]), Disturbance([busy.pid])
            time.sleep(seconds)
            found = strange.share(), own.share()
        finally:
            busy.kill()
    assert None not in found
    return found[0] or 0.0, found[1] or 0.0


def test_a_busy_stranger_is_seen_and_a_busy_worker_is_not() -> None:
    strange, own = shares(0.6)
    assert 0 <= own < strange <= 1
