"""The folder of a trained draft head: head.safetensors (fp16), head.json, README.md (its card).

Of head.safetensors, with hidden size h:

fuse.weight [h,3h]           from the target's hidden states behind three of its layers to the head's feature
embedding_norm.weight [h], feature_norm.weight [h], norm.weight [h]
join.weight [h,2h]           from a token's embedding and the feature before it to the layer's input
layer.*                      one decoder layer of the target's kind, by the names that Hugging Face gives its weights
tokens int32 [n], sorted     the tokens that the head proposes
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from forerun.errors import ExportError
from forerun.schema import SchemaError, parse, unparse

SCHEMA_VERSION = 1
RECORD_NAME, TENSORS_NAME, CARD_NAME = "head.json", "head.safetensors", "README.md"
TOKENS, LAYER = "tokens", "layer."
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class HeadTarget:
    """The model that a head was trained for; `sha256` is its checkpoint's, `vocabulary_sha256` its token map's."""

    sha256: str
    vocabulary_sha256: str
    vocabulary_size: int
    hidden_size: int


@dataclass(frozen=True)
class HeadTraining:
    """How a head came about: `steps` of the optimizer over `tokens` tokens, `unrolled` steps deep.

    `start` is how the head came about from which this training started, if it was not the first.
    """

    command: str
    seed: int
    steps: int
    tokens: int
    unrolled: int
    start: "HeadTraining | None" = None

    @property
    def runs(self) -> "tuple[HeadTraining, ...]":
        """All trainings, the first one first."""
        return (*(self.start.runs if self.start else ()), self)


@dataclass(frozen=True)
class HeadFigures:
    """Of held-out prompts, by drafted token (first, second, ..), each where all before it were the target's own.

    `greedy` is how often the most likely token is the target's; `overlap` is the mean of sum min(p, q) at
    temperature 1, the probability that a drafted token is accepted. `tokens_a_call` is the mean number of tokens
    that a call of the target gives greedily, by draft length (1, 2, ..).
    """

    greedy: tuple[float, ...]
    overlap: tuple[float, ...]
    tokens_a_call: tuple[float, ...] = ()


@dataclass(frozen=True)
class HeadRecord:
    """head.json. `feature_layers` count from 1: "behind layer n"; `epsilon` is that of every norm of the head."""

    schema: int
    target: HeadTarget
    feature_layers: tuple[int, ...]
    epsilon: float
    training: HeadTraining | None = None
    figures: dict[str, HeadFigures] | None = None

    def __post_init__(self) -> None:
        if self.schema != SCHEMA_VERSION:
            raise SchemaError([f"schema: {self.schema} is not {SCHEMA_VERSION}; train the head again"])
        if len(self.feature_layers) != 3 or self.feature_layers[0] < 1:
            raise SchemaError([f"feature_layers: {list(self.feature_layers)} are no three layers, counted from 1"])


@dataclass(frozen=True)
class HeadFolder:
    """A head as it lies on disk; `tensors` by name, all but the tokens in fp16."""

    record: HeadRecord
    tensors: Arrays

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The tokens that the head proposes [n], sorted."""
        return self.tensors[TOKENS]

    def layer(self) -> dict[str, npt.NDArray[Any]]:
        """The decoder layer's weights, by Hugging Face's names within a layer."""
        return {name.removeprefix(LAYER): array for name, array in self.tensors.items() if name.startswith(LAYER)}


def write_head(path: Path, record: HeadRecord, tensors: Arrays, card: str) -> None:
    """Write the folder. Its record goes first and comes last: without one it is no head, never one of mixed files."""
    check_tensors(path, record, tensors)
    path.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.ascontiguousarray(array, _type_of(name)) for name, array in tensors.items()
    }
    files = {
        TENSORS_NAME: save(dict(sorted(arrays.items()))),
        CARD_NAME: card.encode(),
        RECORD_NAME: (json.dumps(unparse(record), indent=2) + "\n").encode(),
    }
    for name, data in files.items():
        (path / f".{name}.part").write_bytes(data)
    (path / RECORD_NAME).unlink(missing_ok=True)
    for name in files:
        os.replace(path / f".{name}.part", path / name)


def _type_of(name: str) -> type:
    return np.int32 if name == TOKENS else np.float16


def read_head(path: Path) -> HeadFolder:
    """Read the folder. Raises ExportError, naming the file at fault, if it is not there, damaged or no head."""
    try:
        record = parse(HeadRecord, json.loads((path / RECORD_NAME).read_text("utf-8")))
        tensors = load((path / TENSORS_NAME).read_bytes())
    except OSError as error:
        raise ExportError(
            f"{path} holds no draft head: {error.filename} cannot be read ({error.strerror}); "
            "give a folder that forerun train-head wrote"
        ) from error
    except SchemaError as error:
        raise ExportError(f"{path / RECORD_NAME} is no record of a head: {error}; train the head again") from error
    except (ValueError, SafetensorError) as error:
        raise ExportError(f"{path} is damaged ({error}); train the head again") from error
    check_tensors(path, record, tensors)
    return HeadFolder(record, tensors)


def check_tensors(path: Path, record: HeadRecord, tensors: Arrays) -> None:
    """Raises ExportError for a tensor that is missing or of another shape, or tokens out of order or range."""
    h = record.target.hidden_size
    norms = {f"{name}.weight": (h,) for name in ("embedding_norm", "feature_norm", "norm")}
    for name, shape in {"fuse.weight": (h, 3 * h), "join.weight": (h, 2 * h), **norms}.items():
        if name not in tensors or tensors[name].shape != shape:
            found = f"has shape {list(tensors[name].shape)}" if name in tensors else "is missing"
            raise ExportError(f"{path}: the head's {name} {found}, not {list(shape)}; train the head again")
    tokens = tensors.get(TOKENS)
    if tokens is None or tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind != "i":
        raise ExportError(f"{path}: the head names no tokens that it proposes; train the head again")
    if (np.diff(tokens) <= 0).any() or tokens[0] < 0 or tokens[-1] >= record.target.vocabulary_size:
        raise ExportError(f"{path}: the head's tokens are not ascending ids of its target; train the head again")
    if not any(name.startswith(LAYER) for name in tensors):
        raise ExportError(f"{path}: the head has no decoder layer; train the head again")
