"""Where the benchmark keeps what it fetches and builds, so that the next run finds it."""

from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """`forerun/bench` in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("forerun")) / "bench"
