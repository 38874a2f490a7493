"""The decoder contract: what the loop expects of a graph, checked when it is loaded."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from forerun.engine import ElementType, Engine, TensorSpec
from forerun.errors import EngineError
from forerun.manifest import Architecture, Manifest

Size = int | str
"""Of a dimension. A name stands for any size: B rows, S tokens, R logit rows, C cache slots, F features."""
Expected = tuple[ElementType, tuple[Size, ...]]

FLOAT, INT64, BOOL = ElementType.FLOAT, ElementType.INT64, ElementType.BOOL

TOKEN_INPUTS: Mapping[str, Expected] = {
    "input_ids": (INT64, ("B", "S")),
    "position_ids": (INT64, ("B", "S")),
    "write_indices": (INT64, ("B",)),
    "tree_mask": (BOOL, ("B", "S", "S")),
    "logit_rows": (INT64, ("B", "R")),
}
"""What every decoder graph reads beside its caches: tokens and their places."""


class Features(enum.Enum):
    """What a graph has to do with the target's features, h numbers for each token that the target has read.

    KEPT: the target of a draft head writes them into one more cache, [B,1,C,h]. READ: the head.
    """

    NONE = enum.auto()
    KEPT = enum.auto()
    READ = enum.auto()


def features_of(role: str, manifest: Manifest) -> Features:
    """Of the role "target" or "draft"."""
    if manifest.draft is None or not manifest.draft.is_head:
        return Features.NONE
    return Features.KEPT if role == "target" else Features.READ


def decoder_inputs(architecture: Architecture, features: Features = Features.NONE) -> dict[str, Expected]:
    """Inputs of a decoder graph: tokens, their places, and the caches [B,H,C,D] of each layer.

    A head also takes features [B,1,F,h] and, for each token, which of the F it reads.
    """
    size = architecture.hidden_size
    read: dict[str, Expected] = {"features": (FLOAT, ("B", 1, "F", size)), "feature_rows": (INT64, ("B", "S"))}
    return {
        **TOKEN_INPUTS,
        **(read if features is Features.READ else {}),
        **_caches("{}_cache.{}", architecture),
        **_feature_cache("feature_cache", architecture, features),
    }


def decoder_outputs(architecture: Architecture, features: Features = Features.NONE) -> dict[str, Expected]:
    """Outputs of a decoder graph: logits [B,R,V] and the caches, written in place.

    A head also gives `hidden` [B,1,R,h], which its next step takes for features.
    """
    given: dict[str, Expected] = {"hidden": (FLOAT, ("B", 1, "R", architecture.hidden_size))}
    return {
        "logits": (FLOAT, ("B", "R", architecture.vocabulary_size)),
        **(given if features is Features.READ else {}),
        **_caches("{}_cache_out.{}", architecture),
        **_feature_cache("feature_cache_out", architecture, features),
    }


def cache_shape(heads: int, size: int) -> tuple[Size, ...]:
    """Of keys, values or features, before a call and after it."""
    return ("B", heads, "C", size)


def _feature_cache(name: str, architecture: Architecture, features: Features) -> dict[str, Expected]:
    return {name: (FLOAT, cache_shape(1, architecture.hidden_size))} if features is Features.KEPT else {}


def _caches(name: str, architecture: Architecture) -> dict[str, Expected]:
    shape = cache_shape(architecture.kv_heads, architecture.head_size)
    return {name.format(kind, layer): (FLOAT, shape) for layer in range(architecture.layers) for kind in "kv"}


def check(engine: Engine, architecture: Architecture, graph: Path, features: Features = Features.NONE) -> None:
    """Raises EngineError that names every way in which a graph is not the decoder that the manifest describes."""
    if found := violations(engine.inputs, engine.outputs, architecture, features):
        raise EngineError(f"{graph} is not a decoder graph for this manifest: {'; '.join(found)}; export again")


def violations(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    architecture: Architecture,
    features: Features = Features.NONE,
    *,
    by_name: bool = False,
) -> list[str]:
    """Every way in which inputs and outputs are not the contract's.

    Sizes that the contract names may be called anything, or be numbers, unless `by_name`.
    """
    return [
        *_violations("input", inputs, decoder_inputs(architecture, features), by_name),
        *_violations("output", outputs, decoder_outputs(architecture, features), by_name),
    ]


def _violations(
    kind: str, found: Sequence[TensorSpec], expected: Mapping[str, Expected], by_name: bool
) -> Iterable[str]:
    specs = {spec.name: spec for spec in found}
    yield from (f"{kind} {name} is missing" for name in expected if name not in specs)
    yield from (f"{kind} {name} is unknown" for name in specs if name not in expected)
    for name, (element_type, shape) in expected.items():
        if name in specs and not _fits(specs[name], element_type, shape, by_name):
            yield (
                f"{kind} {name} is {_told(specs[name].element_type, specs[name].shape)}, "
                f"expected {_told(element_type, shape)}"
            )


def _told(element_type: ElementType | None, shape: Sequence[Size]) -> str:
    """For people: float [B,3,C,64]."""
    sizes = ",".join(str(size) for size in shape)
    return f"{element_type.name.lower() if element_type else 'of another type'} [{sizes}]"


def _fits(spec: TensorSpec, element_type: ElementType, shape: Sequence[Size], by_name: bool) -> bool:
    if spec.element_type is not element_type or len(spec.shape) != len(shape):
        return False
    return all(
        found == size or (not by_name and (isinstance(found, str) or isinstance(size, str)))
        for found, size in zip(spec.shape, shape, strict=True)
    )
