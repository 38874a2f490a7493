"""Whether a graph says the truth about its shapes: ONNX's full checker, strict inference, and the decoder contract.

Every graph that is written passes, and `forerun inspect --verify` looks at those of an engine directory. Weights are
not read: what lies in a weight file takes part as an input of the tensor's shape, wherever the file is. (ONNX's own
check of a path wants weights beside the graph, under a single name.)
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
from onnx.external_data_helper import uses_external_data

from forerun import contract
from forerun.directory import EngineDirectory
from forerun.engine import ElementType, TensorSpec
from forerun.errors import ExportError
from forerun_export.contrib_operators import schemas

_ELEMENT_TYPES = {kind.onnx_type: kind for kind in ElementType}


def require(model: onnx.ModelProto, path: Path) -> None:
    """Raises ExportError, with the first violation, for a graph that does not pass; `path` is where it will lie."""
    if found := first_violation(model):
        raise ExportError(
            f"the graph {path.parent.name}/{path.name} contradicts itself: {found}; use another front end or precision"
        )


def first_violation(model: onnx.ModelProto) -> str:
    """What checker and inference say first; nothing if they pass."""
    without_weights = _without_weights(model)
    with schemas():
        try:
            onnx.checker.check_model(without_weights, full_check=True, check_custom_domain=True)
            onnx.shape_inference.infer_shapes(without_weights, check_type=True, strict_mode=True, data_prop=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            return _first(str(error))
    return ""


def in_directory(engines: EngineDirectory) -> list[str]:
    """A line for each graph of an engine directory that does not pass; the manifest says what a decoder has."""
    manifest, found = engines.manifest, list[str]()
    for role, record in (("target", manifest.target), ("draft", manifest.draft)):
        if record is not None:
            model = onnx.load(engines.file(record.graph), load_external_data=False)
            features = contract.features_of(role, manifest)
            departures = contract.violations(
                _specs(model.graph.input), _specs(model.graph.output), record.architecture, features, by_name=True
            )
            found += _lines(record.graph, [*departures, first_violation(model)])
    for name in manifest.sampling.values():
        found += _lines(name, [first_violation(onnx.load(engines.file(name), load_external_data=False))])
    return found


def _lines(graph: str, found: Sequence[str]) -> Iterable[str]:
    """The first of what was found, and how much more there is."""
    said = [text for text in found if text]
    more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
    return [f"{graph}: {said[0]}{more}"] if said else []


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    weights = [tensor for tensor in copy.graph.initializer if uses_external_data(tensor)]
    for tensor in weights:
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        copy.graph.input.append(value)
        copy.graph.initializer.remove(tensor)
    return copy


def _specs(values: Iterable[onnx.ValueInfoProto]) -> list[TensorSpec]:
    return [
        TensorSpec(value.name, _ELEMENT_TYPES.get(value.type.tensor_type.elem_type), tuple(_sizes(value)))
        for value in values
    ]


def _sizes(value: onnx.ValueInfoProto) -> Iterable[int | str]:
    """The declared sizes; "?" for one that is left open."""
    for size in value.type.tensor_type.shape.dim:
        yield size.dim_value if size.HasField("dim_value") else size.dim_param or "?"


def _first(message: str) -> str:
    """The first violation of several that inference tells, or the checker's only one, in one line."""
    _, several, lines = message.partition("Inference error(s): ")
    first = lines.splitlines()[0] if several else message
    for noise in ("[ShapeInferenceError] ", "[TypeInferenceError] ", "==> Context: "):
        first = first.replace(noise, "")
    return " ".join(first.split())[:300]
