"""Whether an ONNX decoder can be converted, and if not, what is in the way: `forerun inspect model.onnx`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ExportError
from forerun_export.frontends import traced_passes
from forerun_export.frontends.optimum import load, max_positions
from forerun_export.passes import grown_attention
from forerun_export.passes.sides import past_inputs
from forerun_export.passes.static_attention import AttentionLayer
from forerun_export.sources import CONFIG_NAME

# A window shorter than this is found; tables of positions are made for so many.
_CONTEXT = 8192


@dataclass(frozen=True)
class Examination:
    """What was found: a line for each layer that is understood, and all obstacles."""

    path: Path
    layers: tuple[str, ...]
    obstacles: tuple[str, ...]

    def describe(self) -> str:
        """For people."""
        said = "can be converted" if not self.obstacles else "cannot be converted as it is"
        lines = [f"{self.path}: {said}", *_grouped(self.layers)]
        return "\n".join([*lines, *(f"in the way: {obstacle}" for obstacle in self.obstacles)])

    def to_json(self) -> dict[str, Any]:
        """The object that `forerun inspect --json` prints."""
        return {
            "path": str(self.path),
            "convertible": not self.obstacles,
            "layers": list(self.layers),
            "obstacles": list(self.obstacles),
        }


def examine(path: Path) -> Examination:
    """Convert the graph in memory as far as it goes. Raises ExportError if it cannot be read."""
    model, context = load(path), _context(path.parent)
    layers: tuple[str, ...] = ()
    if not past_inputs(model):
        names = ", ".join(str(value.name) for value in model.graph.inputs[:6])
        return Examination(path, (), (f"it has no growing caches past_key_values.N.key (its inputs: {names}, ..)",))
    for apply, name, needed in traced_passes(context):
        try:
            if name == "grown_attention":
                found = grown_attention.read_layers(model, context=context)
                layers = tuple(_line(layer) for layer in found if isinstance(layer, AttentionLayer))
                if obstacles := tuple(str(layer) for layer in found if isinstance(layer, ExportError)):
                    return Examination(path, layers, obstacles)
            outcome = apply(model)
        except ExportError as error:
            return Examination(path, layers, (str(error),))
        if needed and not outcome.modified:
            return Examination(path, layers, (outcome.reason,))
    return Examination(path, layers, ())


def _context(folder: Path) -> int:
    """The positions that the configuration beside the graph tells, up to _CONTEXT."""
    try:
        config = json.loads((folder / CONFIG_NAME).read_text("utf-8"))
    except (OSError, ValueError):
        config = {}
    return min(max_positions(config, default=_CONTEXT), _CONTEXT)


def _line(layer: AttentionLayer) -> str:
    parts = [f"{layer.query_heads} query heads over {layer.kv_heads} KV heads of {layer.head_size}"]
    parts.append(f"scale {layer.scale:.4g}")
    if layer.softcap:
        parts.append(f"scores capped at {layer.softcap:.4g}")
    if layer.visibility.window is not None:
        parts.append(f"a window of {layer.visibility.window} tokens")
    if layer.visibility.slopes:
        parts.append("ALiBi")
    return ", ".join(parts)


def _grouped(lines: tuple[str, ...]) -> list[str]:
    """Lines of layers, neighbours that are alike in one."""
    starts = [place for place, line in enumerate(lines) if place == 0 or line != lines[place - 1]]
    ends = [*starts[1:], len(lines)]
    return [
        f"  layer {start}: {lines[start]}" if end - start == 1 else f"  layers {start} to {end - 1}: {lines[start]}"
        for start, end in zip(starts, ends, strict=True)
    ]
