"""The files that save_sampling_graphs writes: what other programs find in them."""

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from forerun_export.sampling.stages import SAMPLING_GRAPHS, save_sampling_graphs
from helpers.true_shapes import assert_shapes_are_true

# Standard operators that the CUDA provider and TensorRT's parser both have.
PORTABLE = """
    Abs Add And ArgMax Cast Concat CumSum Div Equal Exp Expand Flatten Gather GatherElements GatherND Greater
    GreaterOrEqual Identity If IsNaN Less LessOrEqual Loop Max Min Mod Mul Neg NonZero Not Or Pad Range ReduceLogSum
    ReduceMax ReduceMin ReduceSum Relu Reshape ScatterElements ScatterND Shape Slice Softmax Sqrt Squeeze Sub
    TensorScatter TopK Transpose Unsqueeze Where
"""
INTERFACE = {
    "edit": ("logits edit_tokens edit_bias edit_penalty edit_shift only", "edited"),
    "law": ("logits temperature", "p"),
    "law-filtered": ("logits temperature top_k top_p min_p", "p"),
    "draw": ("p uniforms coupled noise_keys positions", "token"),
    "propose": (
        "p uniforms coupled noise_keys positions step q_in tokens_in",
        "token q_out tokens_out",
    ),
    "verify-residual": ("p q tokens valid accept_uniforms draw_uniforms", "accepted next_token"),
    "verify-block": ("p q tokens valid accept_uniforms draw_uniforms", "accepted next_token"),
    "verify-points": ("p tokens valid accept_uniforms draw_uniforms", "accepted next_token"),
    "verify-coupled": ("p tokens valid noise_keys positions", "accepted next_token"),
    "draw-greedy": ("logits", "token"),
    "propose-greedy": ("logits step tokens_in", "token tokens_out"),
    "verify-greedy": ("logits tokens valid", "accepted next_token"),
    "logprobs": ("p logits temperature tokens", "logprob top_logprobs top_tokens"),
}


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the bodies of its If and Loop nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs_in(attribute.g)


def named_dimensions(value: onnx.ValueInfoProto) -> set[str]:
    """The symbolic sizes of a tensor."""
    return {size.dim_param for size in value.type.tensor_type.shape.dim if size.dim_param}


@pytest.fixture(scope="module", params=[300, 512])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_sampling_graphs(tmp_path_factory.mktemp("stages"), request.param)


def test_each_stage_has_a_file_and_the_agreed_names(files: dict[str, Path]) -> None:
    assert set(files) == set(SAMPLING_GRAPHS) == set(INTERFACE)
    for name, path in files.items():
        graph = onnx.load(path).graph
        named = (" ".join(v.name for v in graph.input), " ".join(v.name for v in graph.output))
        assert (path.name, named) == (f"{name}.onnx", INTERFACE[name])


def test_stages_hold_portable_standard_operators_only(files: dict[str, Path]) -> None:
    for path in files.values():
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
        assert not model.functions
        used = {node.op_type for graph in graphs_in(model.graph) for node in graph.node}
        assert used <= set(PORTABLE.split())
        types = {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
        assert types <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL}


@pytest.mark.parametrize("name", SAMPLING_GRAPHS)
def test_every_value_has_the_shape_that_the_graph_declares(files: dict[str, Path], name: str) -> None:
    assert_shapes_are_true(files[name], may_be_open=True)


def test_inner_tensors_carry_no_dimension_of_a_formula(files: dict[str, Path]) -> None:
    """onnxruntime shares memory between tensors of equal symbolic shapes: "R" is K in one, K+1 in another."""
    for path in files.values():
        model = onnx.load(path)
        own = {name for value in (*model.graph.input, *model.graph.output) for name in named_dimensions(value)}
        for graph in graphs_in(model.graph):
            for value in graph.value_info:
                assert named_dimensions(value) <= own, (path.name, value.name)


def test_no_copy_is_made_to_fill_blocks_that_are_full(files: dict[str, Path]) -> None:
    for path in files.values():
        model = onnx.load(path)
        sizes = {dim.dim_value for value in model.graph.input for dim in value.type.tensor_type.shape.dim}
        if not sizes & {300}:
            assert "Pad" not in {node.op_type for graph in graphs_in(model.graph) for node in graph.node}


def test_loops_carry_few_enough_variables_to_keep_them_in_order(files: dict[str, Path]) -> None:
    """onnxscript takes a loop's variables out of two sets, whose orders agree up to four; then it may swap them."""
    for path in files.values():
        for graph in graphs_in(onnx.load(path).graph):
            assert all(len(node.output) <= 4 for node in graph.node if node.op_type == "Loop")
