"""Directories and files that appear whole or not at all, whatever interrupts the work.

Work goes on in a temporary sibling of the destination (same file system, hidden name). An advisory lock
holds it for as long as its process lives; one that nobody holds was left by a killed run and is removed by
the next. A finished directory is exchanged with the old one in a single system call.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.errors import ExportError
from forerun.manifest import MANIFEST_NAME, FileRecord

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
_OTHER_PLACE = "choose another --out"


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yield an empty temporary directory that takes the place of ``final`` on a normal exit.

    On any exception, KeyboardInterrupt too, the temporary directory is removed and ``final`` stays as it was;
    a killed process leaves at most a hidden sibling that the next run removes. Raises ExportError when
    ``final`` is something other than an engine directory, when the disk is full and when writing is refused.
    """
    with disk_errors(final):
        final = final.resolve()
        _refuse_foreign(final)
        with temporary_sibling(final) as temporary:
            yield temporary
            _sync_tree(temporary)
            # Afterwards the temporary name holds the old directory, which temporary_sibling removes.
            _swap(temporary, final)
            _sync(final.parent)


@contextmanager
def temporary_sibling(final: Path) -> Iterator[Path]:
    """Yield an empty directory beside ``final``, removed at the end; first clear away what killed runs left.

    The parents of ``final`` are made; those that were missing go again if an exception ends the work.
    """
    missing = [parent for parent in final.parents if not parent.exists()]
    existing = final.parents[len(missing)]
    if not existing.is_dir():
        raise ExportError(f"cannot write {final}: {existing} is a file; choose another place")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary, lock = _claim(final)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(lock)
    except BaseException:
        with contextlib.suppress(OSError):  # a parent that has other content stays
            for parent in missing:
                parent.rmdir()
        raise


@contextmanager
def disk_errors(destination: Path, *, other_place: str = _OTHER_PLACE) -> Iterator[None]:
    """Turn a full disk and a refused permission at or beside ``destination`` into ExportError.

    ``other_place`` ends the message: what the user can do to have it written somewhere else.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ExportError(_no_room(destination, None, other_place)) from error
        if error.errno in _REFUSED and _is_beside(error.filename, destination):
            raise ExportError(f"cannot write {destination} ({error.strerror}); change that or {other_place}") from error
        raise


def require_space(path: Path, num_bytes: int, *, other_place: str = _OTHER_PLACE) -> None:
    """Raise ExportError unless the file system that holds, or will hold, ``path`` has ``num_bytes`` free."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise ExportError(_no_room(path, num_bytes - free, other_place))


def file_records(folder: Path) -> dict[str, FileRecord]:
    """The size and SHA-256 of every file under ``folder`` except the manifest, by relative path, in order."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {
        name: FileRecord(bytes=path.stat().st_size, sha256=file_sha256(path))
        for name, path in names.items()
        if name != MANIFEST_NAME
    }


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content in lower-case hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def megabytes(num_bytes: int) -> str:
    """A number of bytes as text in MB (10^6 bytes), rounded up."""
    return f"{-(-num_bytes // 10**6):,} MB"


def _no_room(destination: Path, more: int | None, other_place: str) -> str:
    needs = "needs more than is free" if more is None else f"needs {megabytes(more)} more"
    return f"no room on disk: {destination} {needs}; free some or {other_place}"


def _is_beside(filename: object, destination: Path) -> bool:
    if not isinstance(filename, str | bytes):  # a descriptor or nothing: it is ours as far as anyone can tell
        return True
    folder = Path(os.path.realpath(destination)).parent
    return Path(os.path.realpath(os.fsdecode(filename))).is_relative_to(folder)


def _refuse_foreign(final: Path) -> None:
    if final.exists() and not final.is_dir():
        raise ExportError(f"{final} is a file; choose another --out")
    if not final.exists() or (final / MANIFEST_NAME).exists():
        return
    if next(final.iterdir(), None) is not None:
        raise ExportError(
            f"{final} holds other files and no {MANIFEST_NAME}, so it is left alone; choose another --out"
        )


def _claim(final: Path) -> tuple[Path, int]:
    """A new temporary sibling of ``final`` and the open descriptor that locks it."""
    with _locked(final.parent):  # between mkdir and flock, no other run may take it for a leftover
        _remove_leftovers(final)
        temporary = final.parent / f".{final.name}.{secrets.token_hex(4)}.partial"
        temporary.mkdir()
        lock = os.open(temporary, os.O_RDONLY)
        _try_lock(lock)
    return temporary, lock


def _remove_leftovers(final: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(final.name)}\.[0-9a-f]{{8}}\.(partial|old)")
    for sibling in [path for path in final.parent.iterdir() if pattern.fullmatch(path.name)]:
        with contextlib.suppress(OSError), _opened(sibling) as descriptor:
            if not _try_lock(descriptor):
                continue
            if sibling.suffix == ".old" and not final.exists():
                sibling.rename(final)  # killed between the two renames of _swap_in_two_steps
            else:
                shutil.rmtree(sibling, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with _opened(folder) as descriptor:
        with contextlib.suppress(OSError):  # a file system without locks: then no leftover is removed either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _swap(temporary: Path, final: Path) -> None:
    """Put ``temporary`` at ``final``; whatever was there is found at ``temporary`` (or gone) afterwards."""
    if not final.exists():
        temporary.rename(final)
    elif not _exchange(temporary, final):
        with _locked(final.parent):  # between the renames no other run may take the old one for a leftover
            _swap_in_two_steps(temporary, final)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths atomically (Linux renameat2); False where the system or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _swap_in_two_steps(temporary: Path, final: Path) -> None:
    old = temporary.with_suffix(".old")
    try:
        final.rename(old)
        temporary.rename(final)
    except BaseException:
        if old.exists() and not final.exists():
            old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            _sync(path)


def _sync(path: Path) -> None:
    with _opened(path) as descriptor:
        os.fsync(descriptor)
