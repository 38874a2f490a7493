"""Where the benchmark keeps what it fetches and builds, so that the next run finds it."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`forerun/bench` in the user's cache folder: $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forerun" / "bench"
