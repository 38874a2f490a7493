"""Each pass does what its file says, and says why where it does nothing or cannot."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from forerun.backends.ort import session_options
from forerun.errors import ExportError
from forerun_export.frontends import Decoder, build_decoder, mobius
from forerun_export.graph_files import external_tensors
from forerun_export.graph_runner import GraphRunner
from forerun_export.passes import (
    cached_attention,
    decoder_inputs,
    drop_layers,
    fuse_projections,
    heads_together,
    logit_rows,
    rotary_tables,
    tied_head,
)
from forerun_export.passes.graph_tools import Outcome, drop_unused
from forerun_export.sources import Source, resolve
from helpers.checkpoints import VOCABULARY_SIZE, tiny_llama, tiny_qwen2
from helpers.graphs import kinds, save, with_weight

CONTEXT = 128


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return resolve(str(tiny_llama(tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="module")
def raw(source: Source) -> ir.Model:
    """What the front end gives, before any pass."""
    return mobius.build(source, context=CONTEXT).model


@pytest.fixture
def model(raw: ir.Model) -> ir.Model:
    return raw.clone()


@pytest.fixture(scope="module")
def decoder(source: Source) -> Decoder:
    return build_decoder(source, context=CONTEXT)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return build_decoder(resolve(str(tiny_qwen2(tmp_path_factory.mktemp("qwen")))), context=CONTEXT)


def counts(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def test_the_graph_has_the_contract_s_inputs_and_outputs(decoder: Decoder, tmp_path: Path) -> None:
    graph = ir.load(save(decoder, tmp_path)).graph
    cache = [f"{kind}_cache.{layer}" for layer in range(3) for kind in "kv"]
    assert [(value.name, str(value.shape)) for value in graph.inputs] == [
        ("input_ids", "[B,S]"),
        ("position_ids", "[B,S]"),
        ("write_indices", "[B]"),
        ("tree_mask", "[B,S,S]"),
        ("logit_rows", "[B,R]"),
        *((name, "[B,2,C,8]") for name in cache),
    ]
    assert [value.name for value in graph.outputs] == [
        "logits",
        *(name.replace(".", "_out.") for name in cache),
    ]
    assert str(graph.outputs[0].shape) == f"[B,R,{VOCABULARY_SIZE}]"


def test_only_standard_operators_of_opset_24_are_used(decoder: Decoder) -> None:
    assert {node.domain for node in decoder.model.graph} == {""}
    assert decoder.model.opset_imports == {"": 24}
    assert "Attention" not in kinds(decoder)
    assert not decoder.model.functions


def test_an_input_that_no_decoder_gives_is_refused(decoder: Decoder) -> None:
    model = decoder.model.clone()
    extra = ir.Value(name="pixels", shape=ir.Shape(["B", 8]), type=ir.TensorType(ir.DataType.FLOAT))
    model.graph.inputs.append(extra)
    reader = next(node for node in model.graph if node.op_type == "Add")
    reader.replace_input_with(1, extra)
    with pytest.raises(ExportError, match="also needs pixels"):
        decoder_inputs.apply(model)


def test_a_graph_without_caches_is_refused(model: ir.Model) -> None:
    with pytest.raises(ExportError, match="lacks tree_mask, logit_rows"):
        decoder_inputs.apply(model)


def attention(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if node.op_type == "Attention")


def _masked(model: ir.Model) -> None:
    attention(model).replace_input_with(3, model.graph.inputs[2])


def _not_causal(model: ir.Model) -> None:
    attention(model).attributes["is_causal"] = ir.AttrInt64("is_causal", 0)


def _circular(model: ir.Model) -> None:
    scatter = next(node for node in model.graph if node.op_type == "TensorScatter")
    scatter.attributes["mode"] = ir.AttrString("mode", "circular")


def _without_cache(model: ir.Model) -> None:
    attention(model).replace_input_with(1, attention(model).inputs[0])


def _odd_heads(model: ir.Model) -> None:
    attention(model).attributes["kv_num_heads"] = ir.AttrInt64("kv_num_heads", 4)


INEXPRESSIBLE: Mapping[str, tuple[Callable[[ir.Model], None], str]] = {
    "a mask of its own": (_masked, "an attention mask"),
    "attention to the future": (_not_causal, "not causal"),
    "a circular cache": (_circular, "circular"),
    "keys without a cache": (_without_cache, "static cache"),
    "heads that do not divide": (_odd_heads, "do not fit"),
}


@pytest.mark.parametrize("what", INEXPRESSIBLE)
def test_attention_that_cannot_be_expressed_is_refused(model: ir.Model, what: str) -> None:
    change, message = INEXPRESSIBLE[what]
    change(model)
    with pytest.raises(ExportError, match=f"attention layer 0 cannot be exported: .*{message}"):
        cached_attention.apply(model)


def test_the_mask_is_made_once_for_all_layers(decoder: Decoder) -> None:
    assert kinds(decoder).count("GatherElements") == 1
    assert kinds(decoder).count("Softmax") == 3


def test_the_score_product_never_copies_the_keys(decoder: Decoder, tmp_path: Path) -> None:
    """onnxruntime folds the transpose of K into the product when it loads the graph."""
    import onnx
    import onnxruntime

    options = session_options()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(save(decoder, tmp_path)), options)
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    transposed = {name for node in nodes if node.op_type == "Transpose" for name in node.input}
    assert not {f"k_cache_out.{layer}" for layer in range(3)} & transposed
    assert sum(node.op_type == "FusedMatMul" for node in nodes) == 3


@pytest.fixture
def apart(model: ir.Model) -> ir.Model:
    """A graph whose q and k still turn apart."""
    fuse_projections.apply(model)
    cached_attention.apply(model)
    return model


def test_q_and_k_turn_together(apart: ir.Model) -> None:
    before = counts(apart)
    assert heads_together.apply(apart).modified
    saved = before - counts(apart)
    assert saved == {"RotaryEmbedding": 3, "Reshape": 3 * 2, "Transpose": 3 * 2}
    assert counts(apart) - before == {"Split": 3}


@pytest.mark.parametrize("checkpoint", [tiny_llama, tiny_qwen2, partial(tiny_llama, kv_heads=1)])
def test_turning_together_changes_no_bit(
    checkpoint: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve(str(checkpoint(tmp_path / "checkpoint")))
    together = build_decoder(source, context=CONTEXT)
    monkeypatch.setattr(heads_together, "apply", lambda model: Outcome(False, "not wanted"))
    apart = build_decoder(source, context=CONTEXT)
    assert kinds(together).count("RotaryEmbedding") == kinds(apart).count("RotaryEmbedding") // 2
    tokens = np.random.default_rng(3).integers(0, VOCABULARY_SIZE, (2, 7))
    found = []
    for name, decoder in (("together", together), ("apart", apart)):
        runner = GraphRunner(save(decoder, tmp_path / name))
        caches = runner.new_caches(2, 32)
        logits = [runner.run(caches, tokens, [0, 0]), runner.run(caches, tokens[:, :1], [7, 5])]
        found.append([*logits, *(caches.numpy(f"{kind}_cache.{layer}").copy() for kind in "kv" for layer in range(3))])
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


def test_heads_that_share_no_kv_head_are_left_as_they_are(tmp_path: Path) -> None:
    decoder = build_decoder(resolve(str(tiny_llama(tmp_path / "checkpoint", kv_heads=6))), context=CONTEXT)
    assert kinds(decoder).count("RotaryEmbedding") == 2 * 3
    outcome = heads_together.apply(decoder.model.clone())
    assert not outcome.modified
    assert outcome.reason.startswith("none of 3 splits in three")


@pytest.mark.parametrize("name", ["interleaved", "rotary_embedding_dim", "tables"])
def test_q_and_k_that_turn_differently_are_left_as_they_are(apart: ir.Model, name: str) -> None:
    for node in [node for node in apart.graph if node.op_type == "RotaryEmbedding"][1::2]:
        if name == "tables":
            node.replace_input_with(1, node.inputs[2])
        else:
            node.attributes.add(ir.AttrInt64(name, 8 if name == "rotary_embedding_dim" else 1))
    assert not heads_together.apply(apart).modified


def test_a_graph_without_attention_says_so(decoder: Decoder) -> None:
    outcome = cached_attention.apply(decoder.model.clone())
    assert (outcome.modified, outcome.reason) == (False, "the graph has no Attention node")


def test_projections_of_one_value_become_one_product(model: ir.Model) -> None:
    before = counts(model)["MatMul"]
    assert fuse_projections.apply(model).modified
    assert before - counts(model)["MatMul"] == 3 * (2 + 1), "q, k, v and gate, up of three layers"
    fused = model.graph.initializers["model.layers.0.self_attn.q_proj+k_proj+v_proj.weight_t"]
    assert str(fused.shape) == "[48,80]"


def test_biases_are_fused_with_their_projections(qwen: Decoder) -> None:
    bias = qwen.model.graph.initializers["model.layers.0.self_attn.q_proj+k_proj+v_proj.bias"]
    assert str(bias.shape) == "[96]"


def test_a_second_fusion_finds_nothing(decoder: Decoder) -> None:
    outcome = fuse_projections.apply(decoder.model.clone())
    assert (outcome.modified, outcome.reason) == (False, "no two projections read the same value")


def test_fused_names_keep_what_the_parts_share() -> None:
    assert fuse_projections.joined_name(["l.0.q.weight", "l.0.k.weight"]) == "l.0.q+k.weight"


def test_logit_rows_needs_an_output_named_logits(model: ir.Model) -> None:
    model.graph.outputs[0].name = "scores"
    assert logit_rows.apply(model).reason == "the graph has no output logits"


def test_a_head_that_mixes_rows_is_left_alone(model: ir.Model) -> None:
    softmax = ir.Node("", "Softmax", [model.graph.outputs[0]], outputs=[ir.Value(name="logits")])
    model.graph.outputs[0].name = "scores"
    model.graph.append(softmax)
    model.graph.outputs[0] = softmax.outputs[0]
    assert logit_rows.apply(model).reason == "no row-wise head was found in front of logits"


def test_a_head_equal_to_the_embedding_shares_its_buffer(decoder: Decoder) -> None:
    table = decoder.model.graph.initializers["model.embed_tokens.weight"].const_value
    assert table is not None
    tied = with_weight(decoder, "lm_head.weight", lambda _: table.numpy().T).model
    assert tied_head.apply(tied).modified
    assert not any("lm_head" in name for name in tied.graph.initializers)


def test_a_head_of_its_own_is_kept(decoder: Decoder) -> None:
    assert tied_head.apply(decoder.model.clone()).reason == "the head has weights of its own"


def test_a_tied_head_is_on_disk_once(qwen: Decoder, tmp_path: Path) -> None:
    graph = save(qwen, tmp_path)
    vocabulary_wide = [name for name, tensor in external_tensors(graph).items() if VOCABULARY_SIZE in tensor.shape]
    assert vocabulary_wide == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("context", [CONTEXT, 512, 600])
def test_rotary_tables_reach_past_the_context_for_padding_rows(model: ir.Model, context: int) -> None:
    whole = table(model)
    rotary_tables.apply(model, context=context)
    cut = table(model)
    assert len(cut) == context + rotary_tables.MARGIN
    kept = min(len(whole), len(cut))
    assert np.array_equal(cut[:kept], whole[:kept])
    assert (cut[kept:] == whole[-1]).all()


def test_tables_that_fit_are_left_alone(decoder: Decoder) -> None:
    assert not rotary_tables.apply(decoder.model.clone(), context=CONTEXT).modified


def table(model: ir.Model) -> np.ndarray:
    tensor = model.graph.initializers["model.rotary_emb.cos_cache"].const_value
    assert tensor is not None
    return tensor.numpy()


def test_leaving_layers_out_keeps_names_and_numbers_caches_anew(decoder: Decoder) -> None:
    draft = decoder.without_layers([0]).model.graph
    names = [value.name for value in draft.inputs if "cache" in str(value.name)]
    assert names == ["k_cache.0", "v_cache.0", "k_cache.1", "v_cache.1"]
    assert [value.name for value in draft.outputs][1:] == [name.replace(".", "_out.") for name in map(str, names)]
    assert not any(".layers.0." in name for name in draft.initializers)
    assert set(draft.initializers) < set(decoder.model.graph.initializers)


def test_leaving_out_neighbours_and_the_last_layer_runs(decoder: Decoder, tmp_path: Path) -> None:
    runner = GraphRunner(save(decoder.without_layers([1, 2]), tmp_path))
    logits = runner.run(runner.new_caches(1, 64), [[1, 2, 3]], [0])
    assert np.isfinite(logits).all()


def test_the_decoder_itself_is_unchanged_by_leaving_layers_out(decoder: Decoder) -> None:
    before = kinds(decoder)
    decoder.without_layers([1])
    assert kinds(decoder) == before


@pytest.mark.parametrize(
    ("layers", "message"), [([3], "do not exist"), ([-1], "do not exist"), ([0, 1, 2], "keep at least one")]
)
def test_layers_that_cannot_be_left_out_are_refused(decoder: Decoder, layers: Sequence[int], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        decoder.without_layers(layers)


def test_no_layers_to_leave_out_says_so(decoder: Decoder) -> None:
    outcome = drop_layers.apply(decoder.model.clone(), layers=[])
    assert (outcome.modified, outcome.reason) == (False, "no layers are to be left out")


def test_a_residual_stream_of_another_shape_is_refused(decoder: Decoder) -> None:
    model = decoder.model.clone()
    last = [node for node in model.graph if node.op_type == "Add"][-1]
    last.outputs[0].replace_all_uses_with(last.inputs[0] or last.outputs[0])
    drop_unused(model)
    with pytest.raises(ExportError, match="5 residual additions, not 6"):
        drop_layers.apply(model, layers=[1])
