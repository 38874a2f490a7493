"""A directory appears whole or not at all: after errors, interrupts, kill -9, full disks and broken swaps."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ExportError
from forerun_export import writer
from forerun_export.writer import (
    atomic_directory,
    disk_errors,
    file_records,
    file_sha256,
    require_space,
    temporary_sibling,
)
from helpers.engine_directories import record

WRITER_PROCESS = """
import sys, time
from pathlib import Path
from forerun_export.writer import atomic_directory
with atomic_directory(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half-written")
    print("writing", flush=True)
    time.sleep(600)
"""


def build(final: Path, text: str = "new") -> None:
    with atomic_directory(final) as folder:
        (folder / "target").mkdir()
        (folder / "target" / "model.onnx").write_text(text)
        (folder / "manifest.json").write_text("{}")


def content(final: Path) -> str:
    assert (final / "manifest.json").is_file()
    return (final / "target" / "model.onnx").read_text()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "two renames":
        monkeypatch.setattr(writer, "_exchange", lambda one, other: False)


@pytest.mark.usefixtures("swap")
def test_a_directory_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    final = tmp_path / "engines" / "deep" / "pair"
    build(final, "old")
    assert content(final) == "old"
    build(final, "new")
    assert content(final) == "new"
    assert names_in(final.parent) == ["pair"]


def test_the_exchange_is_one_step_here(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert writer._exchange(tmp_path / "one", tmp_path / "other")
    assert names_in(tmp_path / "one") == ["other"]


def test_an_empty_directory_may_be_built_into_and_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    build(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "real") == "new"
    assert names_in(tmp_path) == ["link", "real"]


def test_a_new_directory_has_the_permissions_of_any_new_directory(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    build(tmp_path / "pair")
    assert (tmp_path / "pair").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, ExportError, KeyboardInterrupt, SystemExit])
def test_an_interrupted_build_leaves_the_old_directory_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    final = tmp_path / "pair"
    build(final, "old")
    with pytest.raises(error), atomic_directory(final) as folder:  # noqa: PT012 the body is what is interrupted
        (folder / "half").touch()
        raise error
    assert content(final) == "old"
    assert names_in(tmp_path) == ["pair"]


def test_an_interrupted_first_build_leaves_no_parents_either(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "a" / "b" / "pair"):
        raise KeyboardInterrupt
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("had_old", [True, False])
def test_kill_9_leaves_the_old_directory_and_the_next_run_clears_up(tmp_path: Path, had_old: bool) -> None:
    final = tmp_path / "pair"
    if had_old:
        build(final, "old")
    process = subprocess.Popen([sys.executable, "-c", WRITER_PROCESS, str(final)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(names_in(tmp_path)) == 1 + had_old  # the leftover is there
    assert final.exists() == had_old
    if had_old:
        assert content(final) == "old"
    build(final, "new")
    assert content(final) == "new"
    assert names_in(tmp_path) == ["pair"]


def test_a_run_does_not_clear_away_the_work_of_another_that_lives(tmp_path: Path) -> None:
    final = tmp_path / "pair"
    with atomic_directory(final) as slow:
        (slow / "manifest.json").write_text("slow")
        build(final, "quick")
        assert content(final) == "quick"
        assert slow.exists()
    assert (final / "manifest.json").read_text() == "slow"
    assert names_in(tmp_path) == ["pair"]


def test_only_siblings_of_this_destination_are_cleared_away(tmp_path: Path) -> None:
    kept = [".pair.backup", ".other.0123abcd.partial", "pair.0123abcd.partial", ".pair2.0123abcd.partial"]
    for name in [*kept, ".pair.0123abcd.partial"]:
        (tmp_path / name).mkdir()
    build(tmp_path / "pair")
    assert names_in(tmp_path) == sorted([*kept, "pair"])


@pytest.mark.parametrize("failing", [1, 2])
def test_a_swap_in_two_renames_that_fails_leaves_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    final = tmp_path / "pair"
    build(final, "old")
    monkeypatch.setattr(writer, "_exchange", lambda one, other: False)
    rename, calls = Path.rename, 0

    def failing_rename(path: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(KeyboardInterrupt):
        build(final, "new")
    assert content(final) == "old"
    assert names_in(tmp_path) == ["pair"]


def test_a_run_killed_between_two_renames_is_mended_by_the_next(tmp_path: Path) -> None:
    final = tmp_path / "pair"
    build(final, "old")
    final.rename(tmp_path / ".pair.0123abcd.old")
    (tmp_path / ".pair.0123abcd.partial").mkdir()
    with pytest.raises(ValueError, match="the new build fails"), atomic_directory(final):
        raise ValueError("the new build fails")
    assert content(final) == "old"
    assert names_in(tmp_path) == ["pair"]


def test_a_failing_exchange_leaves_the_old_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "pair"
    build(final, "old")

    def refuse(one: Path, other: Path) -> bool:
        raise OSError(errno.EIO, "Input/output error", str(other))

    monkeypatch.setattr(writer, "_exchange", refuse)
    with pytest.raises(OSError, match="Input/output"):
        build(final, "new")
    assert content(final) == "old"
    assert names_in(tmp_path) == ["pair"]


def test_a_destination_that_holds_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for name in ("thesis", "file"):
        with pytest.raises(ExportError, match="choose another --out") as caught:
            build(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"
    assert names_in(tmp_path) == ["file", "thesis"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "no room on disk"),
        (errno.EDQUOT, "no room on disk"),
        (errno.EACCES, "cannot write"),
        (errno.EROFS, "cannot write"),
    ],
)
def test_a_full_disk_and_a_refused_write_say_what_to_do(tmp_path: Path, code: int, said: str) -> None:
    final = tmp_path / "pair"
    build(final, "old")
    with pytest.raises(ExportError, match=said) as caught, atomic_directory(final) as folder:
        raise OSError(code, os.strerror(code), str(folder / "weights"))
    assert str(final) in str(caught.value)
    assert "choose another --out" in str(caught.value)
    assert content(final) == "old"
    assert names_in(tmp_path) == ["pair"]


def test_errors_about_other_files_pass_through(tmp_path: Path) -> None:
    for code, filename in [(errno.EACCES, "/elsewhere/source.gguf"), (errno.ENOENT, str(tmp_path / "x"))]:
        with pytest.raises(OSError, match=filename), disk_errors(tmp_path / "pair"):
            raise OSError(code, os.strerror(code), filename)


def test_a_parent_that_is_a_file_is_an_export_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "pair", tmp_path / "file" / "deep" / "pair"):
        with pytest.raises(ExportError, match="file is a file; choose another place"):
            build(path)


def test_a_name_that_no_file_system_takes_is_an_export_error(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="choose another --out"):
        build(tmp_path / ("x" * 250))
    assert names_in(tmp_path) == []


def test_require_space_names_what_is_missing_before_the_work(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet" / "there", 1)
    with pytest.raises(ExportError, match=r"needs [\d,]+ MB more; free some or choose another --out"):
        require_space(tmp_path / "pair", 10**18)


def test_a_temporary_sibling_is_gone_after_success_and_failure(tmp_path: Path) -> None:
    with temporary_sibling(tmp_path / "new" / "file") as folder:
        assert folder.parent == tmp_path / "new"
    with pytest.raises(ValueError, match="no"), temporary_sibling(tmp_path / "new" / "file"):
        raise ValueError("no")
    assert names_in(tmp_path / "new") == []


def test_file_records_hold_every_file_but_the_manifest(tmp_path: Path) -> None:
    build(tmp_path / "pair")
    (tmp_path / "pair" / "a.bin").write_bytes(b"\0" * 3_000_000)
    records = file_records(tmp_path / "pair")
    assert records == {"a.bin": record(b"\0" * 3_000_000), "target/model.onnx": record(b"new")}
    assert list(records) == sorted(records)
    assert file_sha256(tmp_path / "pair" / "a.bin") == records["a.bin"].sha256


def test_what_was_written_is_on_disk_before_the_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def logged(name: str, call: Callable[..., Any]) -> None:
        def run(*arguments: Any) -> Any:
            events.append(name)
            return call(*arguments)

        monkeypatch.setattr(*((os, "fsync") if name == "sync" else (writer, "_swap")), run)

    logged("sync", os.fsync)
    logged("swap", writer._swap)
    build(tmp_path / "pair")
    # two files and two directories, then the swap, then the parent that holds the new name
    assert events == ["sync"] * 4 + ["swap", "sync"]
