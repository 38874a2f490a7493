"""Opening an engine directory reports every way in which it is not what its manifest says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.directory import EngineDirectory
from forerun.errors import EngineError
from forerun.manifest import FileRecord, Limits, Manifest
from helpers.engine_directories import CONTENTS, record, sample_manifest, write_engine_directory


def message_of(folder: Path) -> str:
    with pytest.raises(EngineError) as caught:
        EngineDirectory.open(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def with_draft(manifest: Manifest, **changes: object) -> Manifest:
    assert manifest.draft is not None
    return replace(manifest, draft=replace(manifest.draft, **changes))  # type: ignore[arg-type]


def test_a_good_directory_opens_and_verifies(tmp_path: Path) -> None:
    directory = EngineDirectory.open(write_engine_directory(tmp_path))
    assert directory.manifest == sample_manifest()
    assert directory.file("target/model.onnx").read_bytes() == CONTENTS["target/model.onnx"]
    assert directory.verify() == []


def test_verify_reports_its_progress_up_to_the_total(tmp_path: Path) -> None:
    directory = EngineDirectory.open(write_engine_directory(tmp_path))
    seen: list[int] = []
    directory.verify(seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == directory.total_bytes == sum(map(len, CONTENTS.values()))


def test_no_directory_a_file_and_no_manifest_say_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert "does not exist" in message_of(tmp_path / "nowhere")
    assert "is not a directory" in message_of(tmp_path / "file")
    assert "no manifest.json" in message_of(tmp_path / "empty")
    assert all("forerun export" in message_of(tmp_path / name) for name in ("nowhere", "file", "empty"))


@pytest.mark.parametrize("name", CONTENTS)
def test_any_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write_engine_directory(tmp_path) / name).unlink()
    assert f"{name} is missing" in message_of(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_file_of_another_size_is_named_with_both_sizes(tmp_path: Path, size: int) -> None:
    name = "target/model.onnx.data"
    (write_engine_directory(tmp_path) / name).write_bytes(b"x" * size)
    assert f"{name} is {size} bytes long, the manifest says {len(CONTENTS[name])}" in message_of(tmp_path)


@pytest.mark.parametrize("name", CONTENTS)
def test_changed_content_of_the_same_size_is_found_by_verify_only(tmp_path: Path, name: str) -> None:
    (write_engine_directory(tmp_path) / name).write_bytes(bytes(reversed(CONTENTS[name])))
    (violation,) = EngineDirectory.open(tmp_path).verify()
    assert name in violation
    assert "SHA-256" in violation


def test_verify_names_a_file_that_went_missing_after_opening(tmp_path: Path) -> None:
    directory = EngineDirectory.open(write_engine_directory(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    assert directory.verify() == ["tokenizer.json is missing"]


@pytest.mark.parametrize("name", CONTENTS)
def test_a_used_file_without_a_record_is_named(tmp_path: Path, name: str) -> None:
    manifest = sample_manifest()
    files = {key: value for key, value in manifest.files.items() if key != name}
    write_engine_directory(tmp_path, replace(manifest, files=files))
    assert f"{name} has no record" in message_of(tmp_path)


def test_a_chat_template_that_nobody_recorded_is_named(tmp_path: Path) -> None:
    (write_engine_directory(tmp_path) / "chat_template.jinja").write_text("{{ messages }}")
    assert "chat_template.jinja has no record" in message_of(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "target/../../secret",
        "target/../tokenizer.json",
        "{folder}/tokenizer.json",
        "/etc",
        "link",
    ],
)
def test_a_path_that_leaves_the_directory_or_would_not_move_with_it_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "engine"
    name = name.format(folder=folder)
    manifest = sample_manifest()
    files = {**manifest.files, name: record(b"secret")}
    write_engine_directory(folder, replace(manifest, sampling={"draw": name}, files=files))
    (folder / "link").symlink_to(tmp_path / "secret")
    assert f"{name} is not a plain relative path" in message_of(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: with_draft(m, vocabulary_sha256="0" * 64), "same size, another token map"),
        (
            lambda m: with_draft(m, architecture=replace(m.target.architecture, vocabulary_size=5)),
            "the draft's vocabulary has 5 tokens, the target's 49152",
        ),
        (lambda m: replace(m, target=replace(m.target, vocabulary_sha256="0" * 64)), "not the target's"),
    ],
)
def test_token_maps_that_differ_are_refused(tmp_path: Path, change: Callable[[Manifest], Manifest], said: str) -> None:
    write_engine_directory(tmp_path, change(sample_manifest()))
    assert said in message_of(tmp_path)


def test_a_directory_without_a_draft_is_good(tmp_path: Path) -> None:
    write_engine_directory(tmp_path, replace(sample_manifest(), draft=None))
    assert EngineDirectory.open(tmp_path).manifest.draft is None


@pytest.mark.parametrize("limits", [Limits(0, 8, 8), Limits(8, -1, 8), Limits(8, 8, 0)])
def test_limits_that_are_not_positive_are_refused(tmp_path: Path, limits: Limits) -> None:
    write_engine_directory(tmp_path, replace(sample_manifest(), limits=limits))
    assert "must be at least 1" in message_of(tmp_path)


def test_all_violations_come_in_one_message(tmp_path: Path) -> None:
    manifest = with_draft(sample_manifest(), vocabulary_sha256="0" * 64)
    files = {**manifest.files, "draft/model.onnx": FileRecord(7, "0" * 64)}
    write_engine_directory(tmp_path, replace(manifest, files=files, limits=Limits(0, 8, 0)))
    (tmp_path / "tokenizer.json").unlink()
    message = message_of(tmp_path)
    for part in (
        "draft/model.onnx is 11 bytes long",
        "tokenizer.json is missing",
        "another token map",
        "limits.batch is 0",
        "limits.draft_length is 0",
    ):
        assert part in message
    assert message.endswith("; export again")
