"""The check of decoder graphs: every way in which one is not what the loop expects."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from forerun.contract import check, decoder_inputs, decoder_outputs, violations
from forerun.engine import Call, ElementType, TensorSpec
from forerun.errors import EngineError
from forerun.manifest import Architecture

ARCHITECTURE = Architecture("llama", 2, 6, 3, 16, 96, 100, 512)
Specs = dict[str, TensorSpec]


@dataclass
class Graph:
    """An engine of which only the names and shapes exist."""

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]

    def bind(self, inputs: object, outputs: object) -> Call:
        raise NotImplementedError


def check_changed(change: Callable[[Specs, Specs], object]) -> None:
    inputs, outputs = (
        {name: TensorSpec(name, kind, shape) for name, (kind, shape) in expected(ARCHITECTURE).items()}
        for expected in (decoder_inputs, decoder_outputs)
    )
    change(inputs, outputs)
    graph = Graph(list(inputs.values()), list(outputs.values()))
    check(graph, ARCHITECTURE, Path("target/model.onnx"))


def altered(specs: Specs, name: str, **changes: object) -> None:
    specs[name] = replace(specs[name], **changes)


def test_the_contract_itself_passes_and_so_do_fixed_sizes() -> None:
    check_changed(lambda inputs, outputs: None)
    check_changed(lambda inputs, outputs: altered(inputs, "k_cache.1", shape=(4, 3, 1024, 16)))


CHANGES: dict[str, Callable[[Specs, Specs], object]] = {
    "input logit_rows is missing": lambda inputs, outputs: inputs.pop("logit_rows"),
    "input v_cache.1 is missing": lambda inputs, outputs: inputs.pop("v_cache.1"),
    "output k_cache_out.0 is missing": lambda inputs, outputs: outputs.pop("k_cache_out.0"),
    "input attention_mask is unknown": lambda inputs, outputs: inputs.update(
        attention_mask=TensorSpec("attention_mask", ElementType.BOOL, ("B", "S"))
    ),
    "output hidden is unknown": lambda inputs, outputs: outputs.update(
        hidden=TensorSpec("hidden", ElementType.FLOAT, ("B", "S", 96))
    ),
    r"input tree_mask is int64 \[B,S,S\], expected bool \[B,S,S\]": lambda inputs, outputs: altered(
        inputs, "tree_mask", element_type=ElementType.INT64
    ),
    r"input k_cache.0 is of another type \[B,3,C,16\], expected float": lambda inputs, outputs: altered(
        inputs, "k_cache.0", element_type=None
    ),
    r"input write_indices is int64 \[B,1\], expected int64 \[B\]": lambda inputs, outputs: altered(
        inputs, "write_indices", shape=("B", 1)
    ),
    r"input k_cache.1 is float \[B,6,C,16\], expected float \[B,3,C,16\]": lambda inputs, outputs: altered(
        inputs, "k_cache.1", shape=("B", 6, "C", 16)
    ),
    r"output logits is float \[B,R,99\], expected float \[B,R,100\]": lambda inputs, outputs: altered(
        outputs, "logits", shape=("B", "R", 99)
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_every_departure_is_named_with_the_graph_and_what_to_do(message: str) -> None:
    with pytest.raises(EngineError, match=f"^target/model.onnx is not .*{message}.*; export again$"):
        check_changed(CHANGES[message])


def test_all_departures_are_told_at_once() -> None:
    def change(inputs: Specs, outputs: Specs) -> None:
        inputs.pop("input_ids")
        outputs.pop("logits")

    with pytest.raises(EngineError, match="input input_ids is missing; output logits is missing"):
        check_changed(change)


def test_names_of_sizes_are_free_when_a_graph_is_loaded_and_fixed_when_its_export_is_checked() -> None:
    inputs, outputs = (
        [TensorSpec(name, kind, shape) for name, (kind, shape) in expected(ARCHITECTURE).items()]
        for expected in (decoder_inputs, decoder_outputs)
    )
    assert violations(inputs, outputs, ARCHITECTURE, by_name=True) == []
    outputs[1] = replace(outputs[1], shape=("batch", 3, "C", 16))
    assert violations(inputs, outputs, ARCHITECTURE) == []
    said = "output k_cache_out.0 is float [batch,3,C,16], expected float [B,3,C,16]"
    assert violations(inputs, outputs, ARCHITECTURE, by_name=True) == [said]
