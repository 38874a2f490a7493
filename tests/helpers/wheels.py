"""Wheels for pip to fetch from a folder, never from the network."""

import zipfile
from pathlib import Path


def write_wheel(folder: Path, members: dict[str, bytes], name: str = "tiny_model", version: str = "1.0") -> Path:
    """A wheel with these files in `folder`."""
    info = f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, content in members.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path
