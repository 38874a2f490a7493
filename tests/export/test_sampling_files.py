"""The files that save_sampling_graphs writes: what other programs find in them."""

from pathlib import Path

import onnx
import pytest

from forerun_export.sampling import SAMPLING_GRAPHS, save_sampling_graphs

# Standard operators that the CUDA provider and TensorRT's parser both have.
PORTABLE = """
    Add And ArgMax Cast Concat CumSum Div Equal GatherElements GatherND Greater Less Mul Not Pad Range ReduceMax
    ReduceSum Relu Reshape ScatterElements Shape Slice Softmax Squeeze Sub TensorScatter Unsqueeze Where
"""


@pytest.mark.parametrize("vocabulary_size", [300, 49152])
def test_saved_graphs_hold_portable_standard_operators_only(tmp_path: Path, vocabulary_size: int) -> None:
    files = save_sampling_graphs(tmp_path, vocabulary_size)
    assert files == {name: tmp_path / f"{name}.onnx" for name in SAMPLING_GRAPHS}
    for path in files.values():
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
        assert not model.functions
        assert {node.op_type for node in model.graph.node} <= set(PORTABLE.split())
        types = {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
        assert types <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}


def test_inner_tensors_carry_no_dimension_of_a_formula(tmp_path: Path) -> None:
    """onnxruntime shares memory between tensors of equal symbolic shapes: "R" is K in one, K+1 in another."""
    for path in save_sampling_graphs(tmp_path, 300).values():
        for value in onnx.load(path).graph.value_info:
            named = {size.dim_param for size in value.type.tensor_type.shape.dim if size.dim_param}
            assert named <= {"B", "K", "K+1"}, value.name


def test_no_copy_of_the_logits_is_made_when_blocks_fill_the_vocabulary(tmp_path: Path) -> None:
    for path in save_sampling_graphs(tmp_path, 512).values():
        assert "Pad" not in {node.op_type for node in onnx.load(path).graph.node}
