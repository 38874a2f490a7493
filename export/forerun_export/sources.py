"""Where a checkpoint comes from: a GGUF file, a Hugging Face folder, or a hub id."""

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forerun.errors import ExportError
from forerun_export.gguf_metadata import check_complete, read_metadata

CONFIG_NAME = "config.json"
GRAPH_NAME = "model.onnx"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# What a snapshot needs; repositories often hold the same weights in other formats as well.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_SUBFOLDERS = ["*/*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Source:
    """A checkpoint on this machine.

    `text` is what the user wrote, `path` the GGUF file or the folder that it stands for. A folder of kind "onnx" holds
    a graph that was exported before (model.onnx) and no checkpoint.
    """

    text: str
    kind: Literal["gguf", "folder", "onnx"]
    path: Path

    def sha256(self) -> str:
        """SHA-256 of the GGUF file, or of the folder's configuration, weights and tokenizer, in order of name."""
        if self.kind == "gguf":
            return _file_sha256(self.path)
        digest = hashlib.sha256()
        for file in sorted(_checkpoint_files(self.path, self.kind)):
            digest.update(f"{file.name}\0{_file_sha256(file)}\n".encode())
        return digest.hexdigest()

    def config(self) -> dict[str, object]:
        """The folder's config.json, or the GGUF file's metadata."""
        if self.kind == "gguf":
            return read_metadata(self.path)
        return _read_json(self.path / CONFIG_NAME)


def resolve(text: str) -> Source:
    """The checkpoint that `text` names; a hub id is downloaded unless it lies in the cache already.

    Raises ExportError if there is none, or if it is corrupt, truncated or out of reach.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        return Source(text, _check_folder(path), path)
    if path.is_file() and path.name == GRAPH_NAME:
        _check_config(path.parent)
        return Source(text, "onnx", path.parent)
    if path.is_file():
        check_complete(path)
        return Source(text, "gguf", path)
    if _HUB_ID.fullmatch(text) and not text.endswith(".gguf"):
        folder = _download(text)
        return Source(text, _check_folder(folder), folder)
    raise ExportError(f"{text} does not exist; give a GGUF file, a Hugging Face folder or a hub id (owner/name)")


def _checkpoint_files(folder: Path, kind: str) -> list[Path]:
    weights = ("*.onnx", "*.onnx_data", "*.onnx.data") if kind == "onnx" else ("*.safetensors",)
    patterns = ("*.json", *weights, "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
    return [file for pattern in patterns for file in folder.glob(pattern) if file.is_file()]


def _file_sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}; check the file and its permissions") from error


def _check_folder(folder: Path) -> Literal["folder", "onnx"]:
    """The kind of a folder: a checkpoint, or a graph that was exported before. Raises ExportError if it is neither."""
    _check_config(folder)
    has_weights = (folder / INDEX_NAME).is_file() or (folder / WEIGHTS_NAME).is_file()
    if (folder / GRAPH_NAME).is_file() and not has_weights:
        return "onnx"
    for file in _weight_files(folder):
        _check_safetensors(file)
    return "folder"


def _check_config(folder: Path) -> None:
    if not (folder / CONFIG_NAME).is_file():
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"name the file {folder / ggufs[0]}" if ggufs else "give a Hugging Face model folder"
        raise ExportError(f"{folder} has no {CONFIG_NAME}; {hint}")
    config = _read_json(folder / CONFIG_NAME)
    if not isinstance(config.get("model_type"), str):
        raise ExportError(f"{folder / CONFIG_NAME} names no model_type; give a Hugging Face model folder")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_NAME).is_file():
        shards = _read_json(folder / INDEX_NAME).get("weight_map", {})
        return [folder / name for name in sorted(set(shards.values()))]
    if not (folder / WEIGHTS_NAME).is_file() and any(folder.glob("pytorch_model*.bin")):
        raise ExportError(
            f"{folder} holds its weights as pytorch_model.bin, which can run code when read; load it with "
            "transformers where you trust it, and save_pretrained() it as safetensors"
        )
    return [folder / WEIGHTS_NAME]


def _check_safetensors(path: Path) -> None:
    """The header (its length in 8 bytes, then JSON) says where the last tensor ends."""
    if not path.is_file():
        raise ExportError(f"{path} is missing; fetch the checkpoint again")
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length if length < size else 0))
        end = 8 + length + max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{path} is corrupt (its header cannot be read); fetch it again") from error
    if size < end:
        raise ExportError(f"{path} is truncated: {size} bytes, its tensors need {end}; fetch it again")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read as JSON; fetch it again") from error
    if not isinstance(data, dict):
        raise ExportError(f"{path} is no JSON object; fetch it again")
    return data


def _download(repository: str) -> Path:
    """The folder of a hub repository in the local cache. Raises ExportError saying what to do without a hub."""
    import huggingface_hub
    from huggingface_hub import errors

    elsewhere = "or download it elsewhere and give the folder"
    try:
        folder = huggingface_hub.snapshot_download(
            repository, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SUBFOLDERS, etag_timeout=5
        )
    except errors.GatedRepoError as error:
        raise ExportError(
            f"{repository} is gated; accept its terms on the hub and log in (hf auth login), {elsewhere}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ExportError(
            f"{repository} is no file or folder here and no public repository of the hub; check the name, {elsewhere}"
        ) from error
    except (
        errors.LocalEntryNotFoundError,
        errors.HfHubHTTPError,
        errors.OfflineModeIsEnabled,
        OSError,
    ) as error:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            raise ExportError(
                f"{repository} is no file or folder here and not in the local cache, and HF_HUB_OFFLINE forbids "
                f"fetching it; unset it, {elsewhere}"
            ) from error
        raise ExportError(
            f"{repository} is no file or folder here and the hub {huggingface_hub.constants.ENDPOINT} cannot be "
            f"reached; set HF_ENDPOINT to a mirror, {elsewhere}"
        ) from error
    return Path(folder)
