"""What built graphs are compared with: some prompts, and what the source says about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun_export.progress import Report, silent
from forerun_export.sources import Source

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Prompt:
    """Token ids at the positions `first_position`, `first_position + 1`, .."""

    tokens: tuple[int, ...]
    first_position: int = 0


@dataclass(frozen=True)
class Reference:
    """What the source says about some prompts.

    `logits[i]` [T,V] of prompt i; `rounding[i]` is what float32 may cost: the largest difference between them and
    another run of the source in float32. `name` says what made them.
    """

    name: str
    prompts: tuple[Prompt, ...]
    logits: tuple[Doubles, ...]
    rounding: tuple[float, ...]


def source_references(
    source: Source,
    prompts: Sequence[Prompt],
    *,
    variants: Sequence[tuple[int, ...]] = ((),),
    report: Report = silent,
) -> Mapping[tuple[int, ...], Reference]:
    """The reference of the source with each tuple of layers in `variants` left out, from one load of it.

    A checkpoint is run by PyTorch, a graph that was exported before as it is. Raises ExportError if it cannot be run.
    """
    if source.kind == "onnx":
        from forerun_export.traced import traced_references as run
    else:
        from forerun_export.eager import eager_references as run
    return run(source, prompts, variants=variants, report=report)
