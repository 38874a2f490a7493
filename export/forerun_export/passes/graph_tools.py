"""Small tools shared by the passes: inserting nodes, naming constants, reading weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from forerun.errors import ExportError

CONTRIB = "com.microsoft"
"""The domain of onnxruntime's own operators."""


@dataclass(frozen=True)
class Outcome:
    """What a pass did: whether it changed the model, and if not, why."""

    modified: bool
    reason: str = ""


Attribute = int | float | str | Sequence[int]


class NodeWriter:
    """Writes new nodes into a graph, right before or right after one existing node.

    The nodes are collected and inserted in order when the `with` block ends.
    """

    def __init__(self, graph: ir.Graph, *, before: ir.Node | None = None, after: ir.Node | None = None) -> None:
        self._graph = graph
        self._before = before
        self._after = after
        self._nodes: list[ir.Node] = []

    def __enter__(self) -> "NodeWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None or not self._nodes:
            return
        if self._before is not None:
            self._graph.insert_before(self._before, self._nodes)
        elif self._after is not None:
            self._graph.insert_after(self._after, self._nodes)

    def op(
        self,
        kind: str,
        *inputs: ir.Value | None,
        name: str | None = None,
        domain: str = "",
        **attributes: Attribute,
    ) -> ir.Value:
        """Append one node with one output, called `name` if given; of a standard operator unless `domain` says."""
        return self.ops(kind, *inputs, names=(name,), domain=domain, **attributes)[0]

    def ops(
        self,
        kind: str,
        *inputs: ir.Value | None,
        names: Sequence[str | None],
        domain: str = "",
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Append one node with as many outputs as there are `names`."""
        outputs = [ir.Value(name=name) for name in names]
        node = ir.Node(domain, kind, inputs, convenience.convert_attributes(dict(attributes)), outputs=outputs)
        self._nodes.append(node)
        return node.outputs

    def integers(self, *values: int) -> ir.Value:
        """A constant int64 vector; equal vectors share one initializer."""
        name = "forerun.integers." + "_".join(str(value).replace("-", "minus") for value in values)
        return constant(self._graph, name, np.array(values, dtype=np.int64))

    def scalar(self, value: int | float) -> ir.Value:
        """A constant scalar: int64 for an int, float32 for a float."""
        kind = np.int64 if isinstance(value, int) else np.float32
        name = f"forerun.{np.dtype(kind).name}.{value!r}".replace("-", "minus")
        return constant(self._graph, name, np.array(value, dtype=kind))


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """The initializer `name` of `graph`, made from `array` if it is not there yet."""
    if name not in graph.initializers:
        register(graph, ir.tensor(array, name=name))
    return graph.initializers[name]


def register(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add `tensor` to the graph's initializers under its own name."""
    value = ir.Value(
        name=tensor.name, shape=ir.Shape(sizes(tensor)), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def sizes(tensor: ir.TensorProtocol) -> list[int]:
    """The dimensions of a weight as integers."""
    return [int(size) for size in tensor.shape.numpy()]


def weight(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer, or None for a computed value."""
    return value.const_value if value is not None and value.is_initializer() else None


def derived_weight(
    name: str,
    shape: Sequence[int],
    sources: Sequence[ir.TensorProtocol],
    rule: Callable[..., np.ndarray],
    *,
    dtype: ir.DataType | None = None,
) -> ir.TensorProtocol:
    """A weight computed from others only when it is written, so that no second copy waits in memory.

    Its element type is that of the sources unless `dtype` says otherwise.
    """
    return ir.LazyTensor(
        lambda: ir.Tensor(rule(*(source.numpy() for source in sources)), name=name),
        dtype=dtype or sources[0].dtype,
        shape=ir.Shape(shape),
        name=name,
    )


def nodes_of(model: ir.Model, kind: str) -> list[ir.Node]:
    """All nodes of one standard operator, in graph order."""
    return [node for node in model.graph if node.op_type == kind and node.domain == ""]


def only_consumer(value: ir.Value) -> ir.Node | None:
    """The node that reads `value` if there is exactly one and it is no graph output."""
    consumers = value.consumers()
    return consumers[0] if len(consumers) == 1 and not value.is_graph_output() else None


def producer(value: ir.Value | None, kind: str) -> ir.Node | None:
    """The node that makes `value`, if it is of the given kind."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == kind and node.domain == "" else None


def head(model: ir.Model) -> ir.Node | None:
    """The product that makes the logits, which may be scaled or capped behind it."""
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    node = logits.producer() if logits is not None else None
    while node is not None and node.op_type not in ("MatMul", "MatMulIntegerToFloat"):
        place = 2 if node.op_type == "ScatterElements" else 0  # logits of some tokens, put among all
        source = node.inputs[place] if len(node.inputs) > place else None
        node = source.producer() if source is not None else None
    return node


def graph_input(model: ir.Model, name: str) -> ir.Value:
    """The graph input called `name`. Raises ExportError listing those that are there."""
    for value in model.graph.inputs:
        if value.name == name:
            return value
    known = ", ".join(str(value.name) for value in model.graph.inputs[:8])
    raise ExportError(f"the front end's graph has no input {name} (it has {known}, ..); use another front end")


def add_input(model: ir.Model, name: str, kind: ir.DataType, shape: Sequence[str | int]) -> ir.Value:
    """Append a graph input, or return the one of that name that is there already."""
    for value in model.graph.inputs:
        if value.name == name:
            return value
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
    model.graph.inputs.append(value)
    return value


def replace_output(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of `old` read `new`, which takes its name, type and shape where it is a graph output."""
    if old.is_graph_output():
        old.name, new.name = new.name, old.name
        new.type, new.shape = old.type, old.shape
    convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def remove(model: ir.Model, nodes: Sequence[ir.Node]) -> None:
    """Take nodes that nothing reads any more out of the graph."""
    model.graph.remove(nodes, safe=True)


def drop_unused(model: ir.Model) -> None:
    """Remove nodes and initializers that no output needs."""
    for node in reversed(list(model.graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            model.graph.remove(node, safe=True)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]
