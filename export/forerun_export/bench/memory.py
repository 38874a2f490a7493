"""Memory of processes on Linux, in bytes; None where the system does not tell."""

import contextlib
from pathlib import Path

_SELF = Path("/proc/self")


def peak_bytes() -> int | None:
    """The most memory that this process had resident since the last `reset_peak`, mapped files included."""
    return _kilobytes(_SELF / "status", "VmHWM")


def reset_peak() -> None:
    """Let `peak_bytes` start from what is resident now; nothing happens where that is not allowed."""
    with contextlib.suppress(OSError):
        (_SELF / "clear_refs").write_text("5")


def available_bytes() -> int | None:
    """What a new process can have without swapping, by the kernel's estimate."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable")


def total_bytes() -> int | None:
    """All memory of the machine."""
    return _kilobytes(Path("/proc/meminfo"), "MemTotal")


def _kilobytes(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
