"""The decoder contract: what the loop expects of a graph, checked when it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from forerun.engine import ElementType, Engine, TensorSpec
from forerun.errors import EngineError
from forerun.manifest import Architecture

Expected = tuple[ElementType, tuple[int | None, ...]]  # None: any size

FLOAT, INT64, BOOL = ElementType.FLOAT, ElementType.INT64, ElementType.BOOL


def decoder_inputs(architecture: Architecture) -> dict[str, Expected]:
    """Inputs of a decoder graph: tokens, their places, and the caches [B,H,C,D] of each layer."""
    return {
        "input_ids": (INT64, (None, None)),
        "position_ids": (INT64, (None, None)),
        "write_indices": (INT64, (None,)),
        "tree_mask": (BOOL, (None, None, None)),
        "logit_rows": (INT64, (None, None)),
        **_caches("{}_cache.{}", architecture),
    }


def decoder_outputs(architecture: Architecture) -> dict[str, Expected]:
    """Outputs of a decoder graph: logits [B,R,V] and the caches, written in place."""
    return {
        "logits": (FLOAT, (None, None, architecture.vocabulary_size)),
        **_caches("{}_cache_out.{}", architecture),
    }


def _caches(name: str, architecture: Architecture) -> dict[str, Expected]:
    shape = (None, architecture.kv_heads, None, architecture.head_size)
    return {name.format(kind, layer): (FLOAT, shape) for layer in range(architecture.layers) for kind in "kv"}


def check(engine: Engine, architecture: Architecture, graph: Path) -> None:
    """Raises EngineError that names every way in which a graph is not the decoder that the manifest describes."""
    violations = [
        *_violations("input", engine.inputs, decoder_inputs(architecture)),
        *_violations("output", engine.outputs, decoder_outputs(architecture)),
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
