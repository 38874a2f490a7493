"""A row's logits and caches have the same bits whatever S, the batch, its neighbours, the capacity and the chunks.

In every precision: the quantized graphs too.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from forerun.manifest import Manifest
from forerun_export.frontends import build_decoder
from forerun_export.graph_files import load_graph, save_graph
from forerun_export.graph_runner import Caches, Floats, GraphRunner
from forerun_export.passes import smaller_head
from forerun_export.precision import quantize
from forerun_export.sources import resolve
from helpers.checkpoints import tiny_llama, tiny_llama_of_whole_blocks, tiny_qwen2
from helpers.traced_checkpoints import tiny
from helpers.true_shapes import assert_shapes_are_true

PROMPT, NEW = 37, 9
CAPACITY = 256
MODELS: Mapping[str, Callable[[Path], Path]] = {
    "three query heads to a KV head": tiny_llama,
    "one query head to a KV head": partial(tiny_llama, kv_heads=6),
    "one KV head for all": partial(tiny_llama, kv_heads=1, tied=True),
    "biases": tiny_qwen2,
    "int8, inner sizes of no whole blocks": tiny_llama,
    "int8, a tied head, inner sizes of whole blocks": partial(tiny_llama_of_whole_blocks, tied=True),
    "int8, biases, a smaller head": tiny_qwen2,
    "int4": tiny_llama_of_whole_blocks,
    "int4, some inner sizes of no whole blocks": partial(tiny_llama, query_heads=8, hidden=64),
    "traced: windows and caps": partial(tiny, model_type="gemma2"),
    "traced: ALiBi": partial(tiny, model_type="bloom"),
    "traced: learned positions": partial(tiny, model_type="gpt2"),
    "traced: partial rotary positions": partial(tiny, model_type="gpt_neox"),
}


class Plain:
    """A graph, one sequence of tokens, and the logits of its last NEW tokens when decoded one by one."""

    def __init__(self, runner: GraphRunner) -> None:
        self.runner = runner
        self.random = np.random.default_rng(7)
        self.tokens = self.some_tokens(PROMPT + NEW)
        caches = self.prefilled(CAPACITY, [PROMPT])
        self.logits = np.concatenate(
            [runner.run(caches, [[self.tokens[at]]], [at])[0] for at in range(PROMPT, PROMPT + NEW)]
        )

    def some_tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.random.integers(0, self.runner.vocabulary_size, count)]

    def prefilled(self, capacity: int, chunks: Sequence[int]) -> Caches:
        """Caches [1,H,C,D] that hold the prompt, written in chunks of the given lengths."""
        caches, done = self.runner.new_caches(1, capacity), 0
        for length in chunks:
            self.runner.run(caches, [self.tokens[done : done + length]], [done], logit_rows=[[length - 1]])
            done += length
        assert done == PROMPT
        return caches


@pytest.fixture(scope="module", params=[*MODELS, "SmolLM2", "int8, SmolLM2", "int4, SmolLM2"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder = tmp_path_factory.mktemp("model")
    precision = request.param.partition(",")[0]
    if "SmolLM2" in request.param:
        engines: Path = request.getfixturevalue("smollm2")
        graph = engines / Manifest.read(engines / "manifest.json").target.graph
        model = load_graph(graph, graph.parent)
    else:
        source = resolve(str(MODELS[request.param](folder / "checkpoint")))
        model = build_decoder(source, context=CAPACITY).model
    if precision in ("int8", "int4"):
        quantize(model, precision)
    if "smaller head" in request.param:
        smaller_head.apply(model, ranges=[(0, 16), (60, 200)])
    save_graph(model, folder / "model.onnx", folder / "model.onnx.data")
    if "SmolLM2" not in request.param:  # whose values would take gigabytes
        assert_shapes_are_true(folder / "model.onnx")
    return Plain(GraphRunner(folder / "model.onnx"))


@pytest.mark.parametrize("new", range(1, NEW))
def test_whatever_the_number_of_new_tokens(plain: Plain, new: int) -> None:
    caches = plain.prefilled(CAPACITY, [PROMPT])
    logits = plain.runner.run(caches, [plain.tokens[PROMPT : PROMPT + new]], [PROMPT])[0]
    assert_same_bits(logits, plain.logits[:new])


@pytest.mark.parametrize("capacity", [64, 320, 1024])
def test_whatever_the_capacity(plain: Plain, capacity: int) -> None:
    caches = plain.prefilled(capacity, [PROMPT])
    for new in (1, 5):
        logits = plain.runner.run(caches, [plain.tokens[PROMPT : PROMPT + new]], [PROMPT])[0]
        assert_same_bits(logits, plain.logits[:new])


@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 16, 24])
def test_however_the_prompt_was_cut(plain: Plain, chunk: int) -> None:
    whole = plain.prefilled(CAPACITY, [PROMPT])
    cut = plain.prefilled(CAPACITY, [min(chunk, PROMPT - start) for start in range(0, PROMPT, chunk)])
    for name in whole.values:
        assert_same_bits(cut.numpy(name)[:, :, :PROMPT], whole.numpy(name)[:, :, :PROMPT])
    logits = plain.runner.run(cut, [plain.tokens[PROMPT : PROMPT + 3]], [PROMPT])[0]
    assert_same_bits(logits, plain.logits[:3])


@pytest.mark.parametrize("batch", [2, 3, 4])
@pytest.mark.parametrize("new", [1, 2, 5, 8])
def test_whatever_the_neighbours_are_and_wherever_they_stand(plain: Plain, batch: int, new: int) -> None:
    runner, row = plain.runner, batch // 2
    write = [PROMPT if number == row else int(plain.random.integers(1, 200)) for number in range(batch)]
    longest = max(write)
    prompts = [plain.some_tokens(longest) for _ in range(batch)]
    prompts[row][:PROMPT] = plain.tokens[:PROMPT]
    caches = runner.new_caches(batch, CAPACITY)
    runner.run(caches, prompts, [0] * batch, logit_rows=[[0]] * batch)
    step = [plain.some_tokens(new) for _ in range(batch)]
    step[row] = plain.tokens[PROMPT : PROMPT + new]
    assert_same_bits(runner.run(caches, step, write)[row], plain.logits[:new])


def test_in_a_tree_each_branch_has_the_bits_of_its_own_chain(plain: Plain) -> None:
    """A decoy beside the chain, in the same call, changes nothing, and the chain's slots need not be in order."""
    caches = plain.prefilled(CAPACITY, [PROMPT])
    decoys = plain.some_tokens(2)
    mask = np.array([[[True, False, False], [False, True, False], [False, False, True]]])
    tokens = [[plain.tokens[PROMPT], *decoys]]
    logits = plain.runner.run(caches, tokens, [PROMPT], positions=[[PROMPT] * 3], tree_mask=mask)[0]
    assert_same_bits(logits[:1], plain.logits[:1])


def test_whichever_rows_have_logits(plain: Plain) -> None:
    caches = plain.prefilled(CAPACITY, [PROMPT])
    tokens = [plain.tokens[PROMPT : PROMPT + 6]]
    logits = plain.runner.run(caches, tokens, [PROMPT], logit_rows=[[5, 0, 3]])[0]
    assert_same_bits(logits, plain.logits[[5, 0, 3]])


def test_after_a_rollback_stale_slots_leave_no_trace(plain: Plain) -> None:
    caches = plain.prefilled(CAPACITY, [PROMPT])
    plain.runner.run(caches, [plain.some_tokens(8)], [PROMPT])
    logits = plain.runner.run(caches, [plain.tokens[PROMPT : PROMPT + 2]], [PROMPT])[0]
    assert_same_bits(logits, plain.logits[:2])


def assert_same_bits(found: Floats, expected: Floats) -> None:
    assert found.shape == expected.shape
    differ = found.view(np.int32) != expected.view(np.int32)
    largest = float(np.abs(found - expected).max())
    assert not differ.any(), f"{int(differ.sum())} of {differ.size} numbers differ, by up to {largest:.2g}"
