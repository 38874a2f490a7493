"""The tokenizer of a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from forerun.errors import ExportError
from forerun_export.source_tokenizers import SourceTokenizer, assemble


def from_folder(folder: Path) -> SourceTokenizer:
    """Read tokenizer.json (or convert a slow tokenizer), the chat template and the end tokens.

    End tokens are those of generation_config.json, else of config.json, else of tokenizer_config.json.
    Raises ExportError, naming the file, if one is damaged or none holds a tokenizer.
    """
    config = _read_json(folder / "tokenizer_config.json")
    tokenizer = _tokenizer(folder)
    bos_token, eos_token = (_token_text(config.get(key)) for key in ("bos_token", "eos_token"))
    return assemble(
        tokenizer,
        chat_template=_chat_template(folder, config),
        declared_ends=_declared_ends(folder, tokenizer, eos_token),
        bos_token=bos_token,
        eos_token=eos_token,
    )


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _converted(folder)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ExportError(f"{path} is damaged ({error}); download it again") from error


def _converted(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        slow_or_fast = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each tokenizer class fails in its own way
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"{folder} holds no tokenizer that transformers can load ({reason}); add its tokenizer.json"
        ) from error
    if not slow_or_fast.is_fast:
        raise ExportError(f"{folder} holds a tokenizer without a fast form; add its tokenizer.json")
    tokenizer: Tokenizer = slow_or_fast.backend_tokenizer
    return tokenizer


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _declared_ends(folder: Path, tokenizer: Tokenizer, eos_token: str | None) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        ends = _read_json(folder / name).get("eos_token_id")
        if ends is not None:
            return ends if isinstance(ends, list) else [ends]
    token = None if eos_token is None else tokenizer.token_to_id(eos_token)
    return [] if token is None else [token]


def _token_text(entry: str | dict[str, Any] | None) -> str | None:
    return entry["content"] if isinstance(entry, dict) else entry


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ExportError(f"{path} is no JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ExportError(f"{path} holds no JSON object; download it again")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # bytes, because text mode would rewrite \r\n
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} cannot be read ({error}); download it again") from error
