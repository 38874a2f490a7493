"""Tokens that a traced graph lays into one list of rows [B*S,..] keep their batch: [B,S,..].

GPT-2 and OPT flatten around their products. What stands between the reshapes there and back treats each row by itself,
so both can go; with them goes the target [B,S,..], which has two sizes that are no constants.
"""

import onnx_ir as ir

from forerun_export.passes.graph_tools import NodeWriter, Outcome, drop_unused, nodes_of, replace_output, weight

_ROW_WISE = {"Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Tanh", "Erf", "Sigmoid", "Relu", "Neg", "Gelu"}


def apply(model: ir.Model) -> Outcome:
    """Take out every reshape to [B*S,..] and those back, if only row-wise operators stand between them."""
    flattening = {node: _ends(node.outputs[0]) for node in nodes_of(model, "Reshape") if _is_flattening(node)}
    if not flattening:
        return Outcome(False, "no tokens are laid into one list")
    stuck = [node for node, ends in flattening.items() if ends is None]
    if stuck:  # another list may be added to this one: all or none
        return Outcome(False, f"what {stuck[0].name} lays into one list is not treated row by row")
    for end in dict.fromkeys(end for ends in flattening.values() for end in ends or ()):
        _replace(end.outputs[0], end.inputs[0])
    for node in flattening:
        _keep_batch(model, node)
    drop_unused(model)
    return Outcome(True)


def _is_flattening(node: ir.Node) -> bool:
    before, after = _shape(node.inputs[0]), _shape(node.outputs[0])
    return len(after) == 2 and len(before) > 2 and before[:2] == ["B", "S"]


def _is_end(node: ir.Node) -> bool:
    before, after = _shape(node.inputs[0]), _shape(node.outputs[0])
    return node.op_type == "Reshape" and len(before) == 2 and len(after) == 3 and after[:2] == ["B", "S"]


def _shape(value: ir.Value | None) -> list[str]:
    return [] if value is None or value.shape is None else [str(size) for size in value.shape]


def _keep_batch(model: ir.Model, node: ir.Node) -> None:
    if len(_shape(node.inputs[0])) == 3:
        _replace(node.outputs[0], node.inputs[0])
        return
    with NodeWriter(model.graph, before=node) as w:
        node.replace_input_with(1, w.integers(0, 0, -1))


def _replace(old: ir.Value, new: ir.Value | None) -> None:
    if new is not None:
        replace_output(old, new)


def _ends(value: ir.Value) -> list[ir.Node] | None:
    """The reshapes back to [B,S,..] of all that is made of `value` row by row; None if something else reads it."""
    found: list[ir.Node] = []
    waiting, seen = [value], {value}
    while waiting:
        value = waiting.pop()
        if value.is_graph_output():
            return None
        for node in value.consumers():
            if _is_end(node):
                found.append(node)
            elif not _is_row_wise(node, value):
                return None
            elif node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])
    return list(dict.fromkeys(found))


def _is_row_wise(node: ir.Node, value: ir.Value) -> bool:
    if node.op_type == "MatMul":
        return node.inputs[0] is value and weight(node.inputs[1]) is not None
    if node.op_type == "LayerNormalization":
        return node.attributes.get_int("axis", -1) == -1 and node.inputs[0] is value
    return node.op_type in _ROW_WISE
