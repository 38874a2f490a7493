"""What a training's work folder is of: answers are taken up again only by one that would give the same."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from forerun.errors import ExportError

RECORD_NAME = "work.json"


def claim(folder: Path, origin: Mapping[str, str | int]) -> None:
    """Make the folder, or find it made for `origin`: what answers depend on, by the names that users know.

    Raises ExportError if it holds what came of something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RECORD_NAME
    if not path.exists():
        if other := sorted(one for one in folder.iterdir() if one.name != f".{RECORD_NAME}.part"):
            raise ExportError(
                f"{folder} is no work folder of a training: it holds {other[0].name}; give another --work"
            )
        temporary = folder / f".{RECORD_NAME}.part"
        temporary.write_text(json.dumps(dict(origin), indent=2) + "\n")
        os.replace(temporary, path)
        return
    try:
        there = dict(json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ExportError(f"{path} is damaged; give another --work, or remove {folder}") from error
    different = [name for name in {**origin, **there} if origin.get(name) != there.get(name)]
    if different:
        name = different[0]
        raise ExportError(
            f"{folder} is of a training with {name} {there.get(name)}, not {origin.get(name)}; give another --work, "
            "or remove it"
        )
