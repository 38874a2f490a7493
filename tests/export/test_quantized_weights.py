"""Weights in 8 and 4 bits: the numbers that are stored, the graphs that read them, and what refuses a bad one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from forerun.errors import ExportError
from forerun_export import row_check
from forerun_export.frontends import Decoder, build_decoder
from forerun_export.graph_files import external_tensors
from forerun_export.graph_runner import Floats, GraphRunner
from forerun_export.passes import int4_weights, int8_weights
from forerun_export.precision import products, quantize, weight_bytes
from forerun_export.recipe import Precision
from forerun_export.sources import resolve
from helpers.checkpoints import tiny_llama, tiny_llama_of_whole_blocks
from helpers.graphs import kinds, save, with_weight

TOKENS = [[3, 40, 41, 99, 200, 7, 7, 150]]
CONTEXT = 128


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A decoder whose inner sizes are multiples of 32, its head tied."""
    return built(tmp_path_factory.mktemp("blocks"), lambda folder: tiny_llama_of_whole_blocks(folder, tied=True))


def built(folder: Path, checkpoint: Callable[[Path], Path]) -> Decoder:
    return build_decoder(resolve(str(checkpoint(folder / "checkpoint"))), context=CONTEXT)


def in_precision(decoder: Decoder, precision: Precision) -> Decoder:
    model = decoder.model.clone()
    quantize(model, precision)
    return Decoder(model, decoder.architecture, decoder.frontend)


def logits_of(decoder: Decoder, folder: Path, tokens: list[list[int]] = TOKENS) -> Floats:
    runner = GraphRunner(save(decoder, folder))
    return runner.run(runner.new_caches(len(tokens), 64), tokens, [0] * len(tokens))


def random_matrix(inner: int, width: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((inner, width)).astype(np.float32)


def with_every_weight(decoder: Decoder, change: Callable[[Any], Any]) -> Decoder:
    for name, value in decoder.model.graph.initializers.items():
        if value.shape is not None and len(value.shape) == 2 and "weight" in name and "norm" not in name:
            decoder = with_weight(decoder, name, change)
    return decoder


@pytest.mark.parametrize("axis", [0, 1])
def test_int8_numbers_are_the_nearest_to_their_weights(axis: int) -> None:
    matrix = random_matrix(48, 80)
    numbers, scale = int8_weights.quantized(matrix, axis), int8_weights.scales(matrix, axis)
    assert np.abs(numbers.astype(int)).max(axis=1 - axis).tolist() == [127] * matrix.shape[axis]
    step = np.expand_dims(scale, 1 - axis)
    assert (np.abs(numbers * step - matrix) <= step * 0.501).all()


def test_int8_columns_of_zeros_stay_zeros() -> None:
    matrix = random_matrix(48, 80)
    matrix[:, 7] = 0
    assert not int8_weights.quantized(matrix, 1)[:, 7].any()
    assert np.isfinite(int8_weights.scales(matrix, 1)).all()


def int4_restored(matrix: np.ndarray) -> np.ndarray:
    numbers, scale, zero = int4_weights.quantized(matrix)
    blocks = (numbers.astype(np.float32) - zero[..., None]) * scale[..., None]
    return blocks.reshape(matrix.shape[::-1]).T


def test_int4_numbers_are_nearer_than_rounding_between_the_extremes() -> None:
    matrix = random_matrix(96, 20) + 0.5  # not centred: what zero points are for
    numbers, scale, zero = int4_weights.quantized(matrix)
    assert (numbers.shape, scale.shape, zero.shape) == ((20, 3, 32), (20, 3), (20, 3))
    assert numbers.max() == 15
    blocks = matrix.T.reshape(20, 3, 32)
    step = (blocks.max(axis=2) - np.minimum(blocks.min(axis=2), 0))[..., None] / 15
    plain = np.rint(blocks / step) * step
    restored = int4_restored(matrix).T.reshape(20, 3, 32)
    errors = [np.square(values - blocks).sum() for values in (restored, plain)]
    assert errors[0] < errors[1]


def test_int4_holds_sixteen_even_levels_exactly() -> None:
    levels = (np.random.default_rng(3).integers(0, 16, (32, 5)) - 6) * 0.25
    levels[:16] = ((np.arange(16) - 6) * 0.25)[:, None]
    np.testing.assert_allclose(int4_restored(levels.astype(np.float32)), levels, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.3, -0.3])
def test_int4_blocks_of_one_value_keep_it(value: float) -> None:
    matrix = random_matrix(64, 3)
    matrix[:32, 1] = value
    restored = int4_restored(matrix)
    np.testing.assert_allclose(restored[:32, 1], value, rtol=1e-5)
    assert np.isfinite(restored).all()


def test_packed_numbers_lie_low_half_first_and_an_odd_one_beside_zero() -> None:
    numbers = np.array([[1, 2, 3], [15, 0, 7]], np.uint8)
    assert int4_weights.packed(numbers).tolist() == [[0x21, 0x03], [0x0F, 0x07]]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_graph_computes_with_the_weights_that_the_numbers_stand_for(
    tmp_path: Path, decoder: Decoder, precision: Precision
) -> None:
    """Against the float32 graph with restored weights only the activations are rounded: a few per cent."""

    def restored(matrix: np.ndarray) -> np.ndarray:
        if precision == "int8" or matrix.shape[0] == 272:  # the table of the embedding and the head
            axis = 0 if matrix.shape[0] == 272 else 1
            step = np.expand_dims(int8_weights.scales(matrix, axis), 1 - axis)
            return int8_weights.quantized(matrix, axis) * step
        return int4_restored(matrix)

    found = logits_of(in_precision(decoder, precision), tmp_path / "quantized")
    expected = logits_of(with_every_weight(decoder, restored), tmp_path / "restored")
    original = logits_of(decoder, tmp_path / "original")
    error = np.abs(found - expected).mean() / np.abs(original).mean()
    assert error < 0.05
    if precision == "int4":
        assert error < 0.5 * np.abs(found - original).mean() / np.abs(original).mean()


def test_int8_takes_every_product_and_a_tied_head_reads_the_embedding(tmp_path: Path, decoder: Decoder) -> None:
    quantized = in_precision(decoder, "int8")
    assert products(quantized.model) == {"int8": 3 * 4 + 1}
    path = save(quantized, tmp_path)
    tables = [tensor for name, tensor in external_tensors(path).items() if "embed" in name]
    assert sorted(tensor.dtype for tensor in tables) == sorted([ir.DataType.INT8, ir.DataType.FLOAT])
    assert weight_bytes(quantized.model) < 0.35 * weight_bytes(decoder.model)


def test_int4_leaves_the_head_and_uneven_shapes_to_int8(tmp_path: Path, decoder: Decoder) -> None:
    assert products(in_precision(decoder, "int4").model) == {"int4": 3 * 4, "int8": 1}
    uneven = built(tmp_path, lambda folder: tiny_llama(folder, query_heads=8, hidden=64, intermediate=80))
    assert products(in_precision(uneven, "int4").model) == {"int4": 3 * 3, "int8": 3 + 1}


def test_float32_products_and_activations_elsewhere_stay(decoder: Decoder) -> None:
    before, after = kinds(decoder), kinds(in_precision(decoder, "int8"))
    for kind in ("RMSNormalization", "RotaryEmbedding", "Softmax", "TensorScatter"):
        assert after.count(kind) == before.count(kind)
    assert after.count("MatMul") == 3 * 2  # scores and values of attention


def test_a_row_of_zeros_makes_finite_logits(tmp_path: Path, decoder: Decoder) -> None:
    def without_token_99(table: np.ndarray) -> np.ndarray:
        table[99] = 0
        return table

    silent = with_weight(decoder, "embed", without_token_99)
    assert np.isfinite(logits_of(in_precision(silent, "int8"), tmp_path, [[99, 99, 5]])).all()


def test_the_row_check_lets_every_precision_pass(tmp_path: Path, decoder: Decoder) -> None:
    for precision in ("fp32", "int8", "int4"):
        runner = GraphRunner(save(in_precision(decoder, precision), tmp_path / precision))
        row_check.check(runner, precision=precision)


def test_the_row_check_refuses_a_graph_whose_rows_see_one_another(tmp_path: Path, decoder: Decoder) -> None:
    model = decoder.model.clone()
    logits, ids = model.graph.outputs[0], model.graph.inputs[0]
    cast = ir.node("Cast", [ids], attributes={"to": ir.DataType.FLOAT})
    total = ir.node("ReduceSum", [cast.outputs[0]], attributes={"keepdims": 0})
    seen = ir.node("Add", [logits, total.outputs[0]])
    model.graph.extend([cast, total, seen])
    model.graph.outputs[0] = seen.outputs[0]
    logits.name, seen.outputs[0].name = "logits.alone", "logits"
    seen.outputs[0].type, seen.outputs[0].shape = logits.type, logits.shape
    broken = Decoder(model, decoder.architecture, decoder.frontend)
    runner = GraphRunner(save(broken, tmp_path))
    with pytest.raises(ExportError, match=r"int8, logits depend on how many tokens share a call .*; choose another"):
        row_check.check(runner, precision="int8")
