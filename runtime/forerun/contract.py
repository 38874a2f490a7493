"""The decoder contract: what the loop expects of a graph, checked when it is loaded."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from forerun.engine import ElementType, Engine, TensorSpec
from forerun.errors import EngineError
from forerun.manifest import Architecture, Manifest

Expected = tuple[ElementType, tuple[int | None, ...]]  # None: any size

FLOAT, INT64, BOOL = ElementType.FLOAT, ElementType.INT64, ElementType.BOOL


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
    read: dict[str, Expected] = {"features": (FLOAT, (None, 1, None, size)), "feature_rows": (INT64, (None, None))}
    return {
        "input_ids": (INT64, (None, None)),
        "position_ids": (INT64, (None, None)),
        "write_indices": (INT64, (None,)),
        "tree_mask": (BOOL, (None, None, None)),
        "logit_rows": (INT64, (None, None)),
        **(read if features is Features.READ else {}),
        **_caches("{}_cache.{}", architecture),
        **_feature_cache("feature_cache", architecture, features),
    }


def decoder_outputs(architecture: Architecture, features: Features = Features.NONE) -> dict[str, Expected]:
    """Outputs of a decoder graph: logits [B,R,V] and the caches, written in place.

    A head also gives `hidden` [B,1,R,h], which its next step takes for features.
    """
    given: dict[str, Expected] = {"hidden": (FLOAT, (None, 1, None, architecture.hidden_size))}
    return {
        "logits": (FLOAT, (None, None, architecture.vocabulary_size)),
        **(given if features is Features.READ else {}),
        **_caches("{}_cache_out.{}", architecture),
        **_feature_cache("feature_cache_out", architecture, features),
    }


def _feature_cache(name: str, architecture: Architecture, features: Features) -> dict[str, Expected]:
    shape = (None, 1, None, architecture.hidden_size)
    return {name: (FLOAT, shape)} if features is Features.KEPT else {}


def _caches(name: str, architecture: Architecture) -> dict[str, Expected]:
    shape = (None, architecture.kv_heads, None, architecture.head_size)
    return {name.format(kind, layer): (FLOAT, shape) for layer in range(architecture.layers) for kind in "kv"}


def check(engine: Engine, architecture: Architecture, graph: Path, features: Features = Features.NONE) -> None:
    """Raises EngineError that names every way in which a graph is not the decoder that the manifest describes."""
    violations = [
        *_violations("input", engine.inputs, decoder_inputs(architecture, features)),
        *_violations("output", engine.outputs, decoder_outputs(architecture, features)),
    ]
    if violations:
        raise EngineError(f"{graph} is not a decoder graph for this manifest: {'; '.join(violations)}; export again")


def _violations(kind: str, found: Sequence[TensorSpec], expected: Mapping[str, Expected]) -> Iterable[str]:
    specs = {spec.name: spec for spec in found}
    yield from (f"{kind} {name} is missing" for name in expected if name not in specs)
    yield from (f"{kind} {name} is unknown" for name in specs if name not in expected)
    for name, (element_type, shape) in expected.items():
        if name in specs and not _fits(specs[name], element_type, shape):
            wanted = f"{element_type.name.lower()} {['any' if size is None else size for size in shape]}"
            yield f"{kind} {name} is {specs[name].element_type} {list(specs[name].shape)}, expected {wanted}"


def _fits(spec: TensorSpec, element_type: ElementType, shape: Sequence[int | None]) -> bool:
    return (
        spec.element_type is element_type
        and len(spec.shape) == len(shape)
        and all(
            size is None or isinstance(found, str) or found == size
            for found, size in zip(spec.shape, shape, strict=True)
        )
    )
