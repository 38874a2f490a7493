"""Decoders as Optimum exports them, for tests."""

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from forerun_export.frontends import optimum


def export_folder(checkpoint: Path, folder: Path) -> Path:
    """What `optimum-cli export onnx --task text-generation-with-past` writes, through its Python function."""
    from optimum.exporters.onnx import main_export

    with optimum.quiet(), optimum.on_shared_pool():
        main_export(str(checkpoint), folder, task=optimum.TASK, do_validation=False, local_files_only=True)
    (folder / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    return folder


def first(model: ir.Model, kind: str, *, where: Callable[[ir.Node], bool] = lambda node: True) -> ir.Node:
    """The first node of a kind."""
    return next(node for node in model.graph if node.op_type == kind and where(node))


def insert(model: ir.Model, node: ir.Node, position: int, kind: str, *others: ir.Value | None) -> ir.Node:
    """Put an operator between a node and what it reads at `position`; it reads that and `others`."""
    added = ir.Node("", kind, [node.inputs[position], *others])
    added.outputs[0].name = f"{node.name}.inserted.{kind}"
    model.graph.insert_before(node, added)
    node.replace_input_with(position, added.outputs[0])
    return added


def scalar(model: ir.Model, number: float) -> ir.Value:
    """A float32 constant."""
    value = ir.Value(name=f"test.{number}", const_value=ir.tensor([number], ir.DataType.FLOAT))
    model.graph.register_initializer(value)
    return value
