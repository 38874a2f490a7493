"""Only the rows named by `logit_rows` [B,R] reach the final norm and the head: logits [B,R,V].

A prefill of a long prompt needs one row of logits, not S of them.
"""

import onnx_ir as ir

from forerun_export.passes.graph_tools import NodeWriter, Outcome, add_input, weight

# Operators that treat each row by itself, so that choosing rows before or after them is the same.
_ROW_WISE = {"RMSNormalization", "LayerNormalization", "MatMul", "Mul", "Div", "Add", "Sub", "Tanh", "Cast"}


def apply(model: ir.Model) -> Outcome:
    """Put a GatherND over the rows before the final norm."""
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    if logits is None:
        return Outcome(False, "the graph has no output logits")
    hidden = _before_head(logits)
    if hidden is logits or hidden.producer() is None:
        return Outcome(False, "no row-wise head was found in front of logits")
    rows = add_input(model, "logit_rows", ir.DataType.INT64, ["B", "R"])
    readers = [(node, index) for node, index in hidden.uses()]
    with NodeWriter(model.graph, after=hidden.producer()) as w:
        index = w.op("Unsqueeze", rows, w.integers(-1))
        chosen = w.op("GatherND", hidden, index, batch_dims=1, name="logit_rows.hidden")
    for node, position in readers:
        node.replace_input_with(position, chosen)
    if logits.shape is not None:
        logits.shape = ir.Shape(["B", "R", logits.shape[-1]])
    return Outcome(True)


def _before_head(logits: ir.Value) -> ir.Value:
    """Walk back from the logits over row-wise operators with one computed input: the end of the last layer."""
    value = logits
    while (node := value.producer()) is not None and node.op_type in _ROW_WISE:
        computed = [source for source in node.inputs if source is not None and not _is_weight(source)]
        if len(computed) != 1:
            break
        value = computed[0]
    return value


def _is_weight(value: ir.Value) -> bool:
    """An initializer, or the transpose of one (a tied head)."""
    node = value.producer()
    if node is not None and node.op_type == "Transpose":
        return weight(node.inputs[0]) is not None
    return weight(value) is not None
