"""Other libraries' models, each built once by a process of its own and kept in the user's cache folder."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forerun.errors import ExportError
from forerun_export.bench.places import cache_folder


def built_once(name: str, module: str, arguments: Sequence[str], *, failure: str) -> Path:
    """The folder `name` of the cache, which `python -m module arguments.. FOLDER` makes where it is not there yet.

    Another process builds: its memory is not that of running the model. Raises ExportError, begun with `failure`, if
    it fails.
    """
    folder = cache_folder() / name
    if not folder.is_dir():
        command = [sys.executable, "-m", module, *arguments, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if not folder.is_dir():
            said = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
            raise ExportError(f"{failure}: {said[:300]}; leave this baseline out")
    return folder
