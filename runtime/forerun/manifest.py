"""``manifest.json``: what an engine directory holds, where it came from and what it was checked against."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun.errors import EngineError
from forerun.schema import SchemaError, parse, unparse

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"

Device = Literal["cpu", "cuda", "tensorrt"]


@dataclass(frozen=True)
class FileRecord:
    """One file of the engine directory: its size in bytes and its SHA-256 in lower-case hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Architecture:
    """The numbers of a decoder: ``layers`` that run, and the ``max_positions`` that it was trained for."""

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    hidden_size: int
    vocabulary_size: int
    max_positions: int


@dataclass(frozen=True)
class Parity:
    """How far the graph's logits are from ``reference``: the largest absolute difference over all ``cases``.

    ``bound`` is what rounding explains; an export whose ``max_error`` exceeds it is refused.
    """

    reference: str
    max_error: float
    bound: float
    cases: int


@dataclass(frozen=True)
class Quantization:
    """What a model's cheaper weights cost against itself in float32, on ``tokens`` tokens of a fixed text.

    ``products`` counts matrix products by their format. ``bytes`` of weights that the graph reads. Perplexities are
    exp of the mean of -log p(next token); ``greedy_agreement`` is the share of places with the same most likely
    token, given the same text before; ``mean_kl`` is the mean of KL(float32 || quantized) in nats.
    """

    products: dict[str, int]
    bytes: int
    bytes_fp32: int
    tokens: int
    perplexity: float
    perplexity_fp32: float
    greedy_agreement: float
    mean_kl: float


@dataclass(frozen=True)
class ModelRecord:
    """A target or a draft.

    ``graph`` and ``weights`` are paths relative to the engine directory; a draft made of the target's layers
    names the target's weight file. ``layers_left_out`` are the layers of the source (0-based) skipped.
    ``vocabulary_sha256`` hashes the token map of this model's own tokenizer, so that a pair can be compared.
    ``parity`` is that of the graph in float32, ``quantization`` what another precision changes; None in float32.
    ``head_tokens`` is how many tokens have logits at all, where a draft's head leaves others out.
    ``feature_layers`` are the layers of the target (counted from 1) whose output a trained draft head reads; empty for
    a model that is a decoder of its own.
    """

    graph: str
    weights: str
    source: str
    source_sha256: str
    architecture: Architecture
    precision: str
    frontend: str
    layers_left_out: tuple[int, ...]
    vocabulary_sha256: str
    parity: Parity | None
    quantization: Quantization | None = None
    head_tokens: int | None = None
    feature_layers: tuple[int, ...] = ()

    @property
    def is_head(self) -> bool:
        """Whether this draft is a trained head, which nothing but its target's features can feed."""
        return bool(self.feature_layers)


@dataclass(frozen=True)
class TokenizerRecord:
    """The pair's tokenizer: its token map's hash, the tokens that end a sequence, BOS and EOS texts."""

    vocabulary_sha256: str
    end_tokens: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None


@dataclass(frozen=True)
class Limits:
    """The largest batch (rows), context (tokens of a row, prompt included) and draft length K."""

    batch: int
    context: int
    draft_length: int


@dataclass(frozen=True)
class BackendRecord:
    """What runs the graphs, and the versions of the packages that it was exported with."""

    name: Literal["onnxruntime"]
    device: Device
    versions: dict[str, str]


@dataclass(frozen=True)
class Manifest:
    """The whole of ``manifest.json``.

    ``recipe_sha256`` is the key under which the exporter recognises its own work. ``sampling`` maps the name
    of a sampling graph to its path. ``files`` records every file but the manifest, by relative path.
    """

    schema: int
    forerun: str
    recipe_sha256: str
    target: ModelRecord
    draft: ModelRecord | None
    sampling: dict[str, str]
    tokenizer: TokenizerRecord
    limits: Limits
    backend: BackendRecord
    files: dict[str, FileRecord]

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """The manifest in the file ``path``.

        Raises EngineError when it cannot be read, is of another schema (looked at before anything else, as a
        newer schema may have other keys), or does not fit the schema: then every fault is named.
        """
        data = _json_object(path)
        _check_schema(path, data.get("schema"))
        try:
            return parse(cls, data)
        except SchemaError as fault:
            raise EngineError(f"{path}: {fault}; export again") from None

    def write(self, path: Path) -> None:
        """Write JSON in field order, the files by name; the same manifest always gives the same bytes."""
        data = unparse(self)
        data["files"] = dict(sorted(data["files"].items()))
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _json_object(path: Path) -> dict[str, object]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"cannot read {path}: {error.strerror}; check its permissions") from None
    except ValueError as error:
        raise EngineError(f"{path} is not valid JSON ({error}); export again") from None
    if not isinstance(data, dict):
        raise EngineError(f"{path} is not a JSON object; export again")
    return data


def _check_schema(path: Path, found: object) -> None:
    if found == SCHEMA_VERSION and type(found) is int:
        return
    if type(found) is int and found > SCHEMA_VERSION:
        raise EngineError(
            f"{path} has schema {found}, this forerun reads {SCHEMA_VERSION}; upgrade forerun or export again"
        )
    said = "no schema" if found is None else f"schema {found}"
    raise EngineError(f"{path} has {said}, this forerun reads {SCHEMA_VERSION}; export again")
