"""Files of JSON lines that grow while work goes on, and outlive a run that is killed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import ExportError


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a file, none if it does not exist; a last line that a killed run left half-written is cut off.

    Raises ExportError for a file that holds something else.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    try:
        # Not splitlines: JSON strings may hold other ends of lines than this one.
        entries = [json.loads(line) for line in data[:whole].split(b"\n")[:-1]]
    except ValueError as error:
        raise ExportError(f"{path} is damaged ({error}); remove it, and what it holds is made again") from error
    if not all(isinstance(entry, dict) for entry in entries):
        raise ExportError(f"{path} is damaged; remove it, and what it holds is made again")
    return entries


def append_line(path: Path, entry: Mapping[str, object]) -> None:
    """Add an entry at the end of the file, which is made if need be."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")
