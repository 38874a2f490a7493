"""What a traced graph does is proven before it is rewritten; what cannot be expressed is refused by name."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from forerun.errors import ExportError
from forerun_export.frontends import optimum, run_passes, traced_passes
from forerun_export.passes import (
    fixed_sizes,
    flat_rows,
    grown_attention,
    norm_operator,
    position_tables,
    rotary_operator,
    tidy,
)
from forerun_export.passes.evaluation import Piece
from forerun_export.passes.sides import Run
from forerun_export.sources import resolve
from helpers.traced_checkpoints import tiny
from helpers.traced_graphs import first, insert, scalar

CONTEXT = 64


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> ir.Model:
    """A Llama as Optimum traces it."""
    return optimum.build(resolve(str(tiny(tmp_path_factory.mktemp("llama"), "llama"))), context=CONTEXT).model


@pytest.fixture
def model(traced: ir.Model) -> ir.Model:
    return traced.clone()


@pytest.fixture(scope="module")
def sized(traced: ir.Model) -> ir.Model:
    model = traced.clone()
    tidy.apply(model)
    fixed_sizes.apply(model, context=CONTEXT)
    return model


def counts(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def test_nothing_of_the_tracer_is_left(model: ir.Model) -> None:
    run_passes(model, traced_passes(CONTEXT))
    found = counts(model)
    assert not {"Cast", "Constant", "Identity", "Expand", "IsNaN", "Pow", "ReduceMean", "Cos"} & set(found) - {"Expand"}
    assert found["RMSNormalization"] == 7
    assert found["RotaryEmbedding"] == 6
    assert found["TensorScatter"] == 6
    assert found["Shape"] == 3, "for the mask"
    assert model.opset_imports == {"": 24}
    assert "model.layers.1.mlp.down_proj.weight" in model.graph.initializers, "weights are called as in the checkpoint"


def test_sizes_become_constants_and_the_graph_computes_the_same(traced: ir.Model, sized: ir.Model) -> None:
    targets = [node.inputs[1] for node in sized.graph if node.op_type == "Reshape" and "self_attn" in str(node.name)]
    assert sum(value is not None and value.const_value is not None for value in targets) >= 12
    run = Run(batch=2, new=4, past=6)
    logits = [Piece(m, [m.graph.outputs[0]]).run(run.feeds(m.graph.inputs))[0] for m in (traced, sized)]
    assert np.allclose(*logits, rtol=1e-6, atol=1e-6)


def softmax(model: ir.Model) -> ir.Node:
    return first(model, "Softmax")


def product_with_values(model: ir.Model) -> ir.Node:
    return first(model, "MatMul", where=lambda node: "Softmax" in str(getattr(node.inputs[0], "name", "")))


def _masked_like_an_encoder(model: ir.Model) -> None:
    comparison = first(model, "LessOrEqual")
    swapped = list(reversed(comparison.inputs))
    for position, value in enumerate(swapped):
        comparison.replace_input_with(position, value)


def _weights_doubled(model: ir.Model) -> None:
    insert(model, product_with_values(model), 0, "Mul", scalar(model, 2.0))


def _weights_dropped(model: ir.Model) -> None:
    product = product_with_values(model)
    insert(model, product, 0, "Sub", scalar(model, 0.01))
    insert(model, product, 0, "Relu")


def _values_scaled(model: ir.Model) -> None:
    insert(model, product_with_values(model), 1, "Mul", scalar(model, 3.0))


def _values_without_sign(model: ir.Model) -> None:
    insert(model, product_with_values(model), 1, "Abs")


def _scores_squashed(model: ir.Model) -> None:
    insert(model, softmax(model), 0, "Sigmoid")


def _scores_scaled_by_tokens(model: ir.Model) -> None:
    tokens = ir.Node("", "Cast", [model.graph.inputs[0]], [ir.AttrInt64("to", 1)])
    tokens.outputs[0].name = "tokens"
    mean = ir.Node("", "ReduceMean", [tokens.outputs[0]], [ir.AttrInt64("keepdims", 0)])
    mean.outputs[0].name = "mean"
    model.graph.insert_before(next(iter(model.graph)), [tokens, mean])
    insert(model, softmax(model), 0, "Mul", mean.outputs[0])


def _bias_by_slot(model: ir.Model) -> None:
    """A bias that grows with the square of the slot is no ALiBi."""
    mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
    numbers = ir.Node("", "Cast", [mask], [ir.AttrInt64("to", 1)])
    axis = ir.Value(name="test.axis", const_value=ir.tensor(1, ir.DataType.INT64))
    model.graph.register_initializer(axis)
    slots = ir.Node("", "CumSum", [numbers.outputs[0], axis])
    squares = ir.Node("", "Mul", [slots.outputs[0], slots.outputs[0]])
    axes = ir.Value(name="test.axes", const_value=ir.tensor([1, 2]))
    model.graph.register_initializer(axes)
    bias = ir.Node("", "Unsqueeze", [squares.outputs[0], axes])
    for name, node in {"numbers": numbers, "slots": slots, "squares": squares, "bias": bias}.items():
        node.outputs[0].name = name
    model.graph.insert_before(next(iter(model.graph)), [numbers, slots, squares, bias])
    insert(model, softmax(model), 0, "Add", bias.outputs[0])


INEXPRESSIBLE: Mapping[str, tuple[Callable[[ir.Model], None], str]] = {
    "it sees what comes": (_masked_like_an_encoder, "last token sees|neither causal"),
    "weights are doubled": (_weights_doubled, "not weighted by the softmax"),
    "small weights are cut off": (_weights_dropped, "not weighted by the softmax"),
    "values are scaled": (_values_scaled, r"values are multiplied by 3\.0"),
    "values lose their sign": (_values_without_sign, r"past_key_values\.0\.value reaches the product changed"),
    "scores are squashed": (_scores_squashed, "off by|neither causal"),
    "scores depend on other tokens": (_scores_scaled_by_tokens, "attention layer 0|no attention was recognised"),
    "scores are biased by slots": (_bias_by_slot, "off by"),
}


@pytest.mark.parametrize("what", INEXPRESSIBLE)
def test_attention_that_cannot_be_expressed_is_refused_by_its_layer(sized: ir.Model, what: str) -> None:
    model = sized.clone()
    change, message = INEXPRESSIBLE[what]
    change(model)
    with pytest.raises(ExportError, match=message) as caught:
        grown_attention.apply(model, context=CONTEXT)
    assert "layer 0" in str(caught.value) or "past_key_values.0" in str(caught.value)


def test_a_cap_of_the_configuration_that_the_graph_lacks_is_told(sized: ir.Model) -> None:
    with pytest.raises(ExportError, match="caps attention scores at 50"):
        grown_attention.apply(sized.clone(), context=CONTEXT, softcap=50.0)


def test_angles_that_depend_on_the_longest_position_are_refused(sized: ir.Model) -> None:
    """Phi-3's long contexts choose other frequencies once a call is long: such rows cannot be the same in each call."""
    model = sized.clone()
    grown_attention.apply(model, context=CONTEXT)
    positions = next(value for value in model.graph.inputs if value.name == "position_ids")
    numbers = ir.Node("", "Cast", [positions], [ir.AttrInt64("to", 1)])
    longest = ir.Node("", "ReduceMax", [numbers.outputs[0]], [ir.AttrInt64("keepdims", 0)])
    numbers.outputs[0].name, longest.outputs[0].name = "numbers", "longest"
    model.graph.insert_before(next(iter(model.graph)), [numbers, longest])
    insert(model, first(model, "Cos"), 0, "Mul", longest.outputs[0])
    with pytest.raises(ExportError, match=r"no table by position \(it is another for 3 tokens"):
        position_tables.apply(model, context=CONTEXT)


def test_a_table_gives_each_position_s_row_and_repeats_the_last_for_padding(sized: ir.Model) -> None:
    model = sized.clone()
    grown_attention.apply(model, context=CONTEXT)
    cosines = first(model, "Cos").outputs[0]
    expected = Piece(model, [cosines]).run(Run(batch=1, new=CONTEXT, past=0).feeds(model.graph.inputs))[0][0]
    position_tables.apply(model, context=CONTEXT)
    tables = [value.const_value for name, value in model.graph.initializers.items() if name.startswith("positions.")]
    found = next(t.numpy() for t in tables if t is not None and np.allclose(t.numpy()[:CONTEXT], expected))
    assert len(found) == CONTEXT + 16
    assert (found[CONTEXT:] == found[CONTEXT - 1]).all()


def _float16_weight(model: ir.Model) -> None:
    name = next(name for name in model.graph.initializers if "embed" in name)
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    model.graph.initializers[name].const_value = ir.tensor(tensor.numpy().astype(np.float16), name=name)
    model.graph.initializers[name].type = ir.TensorType(ir.DataType.FLOAT16)


def _of_a_vendor(model: ir.Model) -> None:
    node = ir.Node("com.microsoft", "FastGelu", [softmax(model).outputs[0]])
    node.outputs[0].name = "fast"
    model.graph.append(node)


def _old(model: ir.Model) -> None:
    model.graph.opset_imports[""] = 11


def _branching(model: ir.Model) -> None:
    branch = ir.Graph([], [], nodes=[], name="branch")
    condition = ir.Value(name="condition")
    model.graph.inputs.append(condition)
    attributes = [ir.AttrGraph("then_branch", branch), ir.AttrGraph("else_branch", ir.Graph([], [], nodes=[]))]
    model.graph.append(ir.Node("", "If", [condition], attributes, num_outputs=0, name="/merged"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_float16_weight, "embed.* is FLOAT16; export the model in float32"),
        (_of_a_vendor, "FastGelu, no standard operator"),
        (_old, "opset 11"),
        (_branching, "/merged .If. is control flow"),
    ],
)
def test_graphs_of_another_kind_are_refused(model: ir.Model, change: Callable[[ir.Model], None], message: str) -> None:
    change(model)
    with pytest.raises(ExportError, match=message):
        tidy.apply(model)


def test_passes_that_find_nothing_say_so(sized: ir.Model) -> None:
    model = sized.clone()
    run_passes(model, [p for p in traced_passes(CONTEXT) if p[1] not in ("tidy", "fixed_sizes", "decoder_inputs")])
    assert flat_rows.apply(model).reason == "no tokens are laid into one list"
    assert rotary_operator.apply(model).reason == "no sum x * cos + rotate_half(x) * sin was found"
    assert norm_operator.apply(model).reason == "none of 0 means over a row is part of a norm"
    assert position_tables.apply(model, context=CONTEXT).reason == "no value that data nodes read depends on positions"


def test_a_graph_without_growing_caches_is_told_how_to_be_exported(model: ir.Model) -> None:
    model.graph.inputs[:] = [value for value in model.graph.inputs if "past" not in str(value.name)]
    assert "text-generation-with-past" in grown_attention.apply(model, context=CONTEXT).reason


def test_a_damaged_graph_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(ExportError, match=r"model\.onnx cannot be read"):
        optimum.load(tmp_path / "model.onnx")
