"""Data becomes frozen dataclasses or a list of all its faults; the manifest survives a round trip."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from forerun.errors import EngineError
from forerun.manifest import Limits, Manifest
from forerun.schema import SchemaError, parse, unparse
from helpers.engine_directories import sample_manifest


@dataclass(frozen=True)
class Inner:
    count: int
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.count < 0:
            raise SchemaError([f"count: expected at least 0, found {self.count}"])
        if self.count == 13:
            raise ValueError("13 is not wanted")


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    kind: Literal["red", "green"] = "red"
    flag: bool = False
    maybe: Inner | None = None
    numbers: tuple[int, ...] = ()
    names: list[str] = field(default_factory=list)
    table: dict[str, Inner] = field(default_factory=dict)


FULL: dict[str, Any] = {
    "name": "é",
    "inner": {"count": 3, "ratio": 2},
    "kind": "green",
    "flag": True,
    "maybe": None,
    "numbers": [1, 2],
    "names": ["a"],
    "table": {"x": {"count": 0}},
}


def faults_of(data: object) -> list[str]:
    with pytest.raises(SchemaError) as caught:
        parse(Outer, data)
    return caught.value.faults


def changed(path: str, value: object) -> dict[str, Any]:
    data = json.loads(json.dumps(FULL))
    *tables, last = path.split(".")
    inner = data
    for table in tables:
        inner = inner[table]
    inner[last] = value
    return dict(data)


def test_every_kind_of_hint_is_parsed() -> None:
    expected = Outer("é", Inner(3, 2.0), "green", True, None, (1, 2), ["a"], {"x": Inner(0)})
    parsed = parse(Outer, FULL)
    assert parsed == expected
    assert type(parsed.inner.ratio) is float
    assert type(parsed.numbers) is tuple


def test_fields_with_defaults_may_be_missing() -> None:
    assert parse(Outer, {"name": "n", "inner": {"count": 1}}) == Outer("n", Inner(1))


def test_unparse_is_undone_by_parse() -> None:
    outer = parse(Outer, FULL)
    assert parse(Outer, json.loads(json.dumps(unparse(outer)))) == outer


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("name", 3, "name: expected a string, found 3"),
        ("name", None, "name: expected a string, found null"),
        ("flag", 1, "flag: expected true or false, found 1"),
        ("inner", [], "inner: expected a table, found []"),
        ("inner.count", True, "inner.count: expected an integer, found true"),
        ("inner.count", 1.0, "inner.count: expected an integer, found 1.0"),
        ("inner.count", "1", 'inner.count: expected an integer, found "1"'),
        ("inner.ratio", float("nan"), "inner.ratio: expected a finite number, found NaN"),
        ("inner.ratio", float("inf"), "inner.ratio: expected a finite number, found Infinity"),
        ("inner.ratio", False, "inner.ratio: expected a finite number, found false"),
        ("inner.count", -1, "inner.count: expected at least 0, found -1"),
        ("inner.count", 13, "inner: 13 is not wanted"),
        ("inner.other", 1, "inner.other: unknown key (known: count, ratio)"),
        ("kind", "blue", 'kind: expected one of red, green, found "blue"'),
        ("kind", [], "kind: expected one of red, green, found []"),
        ("maybe", {}, "maybe.count: missing"),
        ("numbers", [1, "2"], 'numbers[1]: expected an integer, found "2"'),
        ("numbers", "12", 'numbers: expected a list, found "12"'),
        ("table", [], "table: expected a table, found []"),
        ("table", {"x": {"count": "y"}}, 'table.x.count: expected an integer, found "y"'),
    ],
)
def test_a_fault_names_its_path_what_was_expected_and_what_was_found(path: str, value: object, fault: str) -> None:
    assert faults_of(changed(path, value)) == [fault]


def test_all_faults_are_named_at_once() -> None:
    faults = faults_of({"inner": {"count": "many", "extra": 0}, "numbers": [True], "shade": 1})
    named = {fault.split(":")[0] for fault in faults}
    assert named == {"shade", "name", "inner.count", "inner.extra", "numbers[0]"}


def test_data_that_is_no_table_is_a_fault() -> None:
    assert faults_of([1]) == ["top level: expected a table, found [1]"]


def test_a_long_value_is_shown_in_part() -> None:
    (fault,) = faults_of(changed("inner", "x" * 10_000))
    assert len(fault) < 200


def test_a_manifest_survives_writing_and_reading(tmp_path: Path) -> None:
    manifest = sample_manifest()
    manifest.write(tmp_path / "manifest.json")
    assert Manifest.read(tmp_path / "manifest.json") == manifest


def test_the_same_manifest_gives_the_same_bytes_whatever_the_order_of_its_files(tmp_path: Path) -> None:
    manifest = sample_manifest()
    manifest.write(tmp_path / "one.json")
    replace(manifest, files=dict(reversed(manifest.files.items()))).write(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_a_newer_schema_is_refused_before_anything_else_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text('{"schema": 2, "models": []}')
    with pytest.raises(EngineError) as caught:
        Manifest.read(path)
    assert str(caught.value).endswith(
        "manifest.json has schema 2, this forerun reads 1; upgrade forerun or export again"
    )


@pytest.mark.parametrize("text", ['{"schema": 0}', "{}", '{"schema": true}', '{"schema": "1"}', "[]", "{", "\xff"])
def test_a_file_that_is_no_manifest_of_this_schema_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(EngineError, match="export again") as caught:
        Manifest.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_fault_of_a_manifest_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    data = unparse(sample_manifest())
    data["limits"]["batch"] = "8"
    data["target"]["architecture"]["head_size"] = None
    del data["tokenizer"]["end_tokens"]
    path.write_text(json.dumps(data))
    with pytest.raises(EngineError) as caught:
        Manifest.read(path)
    for part in (str(path), "limits.batch", "target.architecture.head_size", "tokenizer.end_tokens: missing"):
        assert part in str(caught.value)


def test_a_missing_manifest_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"manifest\.json"):
        Manifest.read(tmp_path / "manifest.json")


def test_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Limits(1, 2, 3).batch = 4  # type: ignore[misc]
