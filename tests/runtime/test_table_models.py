"""The table models themselves: what every test of the loop stands on."""

from pathlib import Path

import pytest

import forerun
from forerun.engine import ElementType
from forerun.model import Shape
from forerun.oracle import argmax
from helpers.reference import greedy
from helpers.table_models import engine_directory, random_model, script_after, scripted


def test_the_graph_says_what_the_python_model_says(tmp_path: Path) -> None:
    model = random_model(1)
    with forerun.open(engine_directory(tmp_path / "engines", model)) as decoder:
        assert decoder.generate([3, 1, 4], max_new_tokens=20).token_ids == greedy(model, [3, 1, 4], 20)


@pytest.mark.parametrize("kind", ["k", "v"])
def test_every_number_in_a_cache_slot_changes_the_law(tmp_path: Path, kind: str) -> None:
    with forerun.open(engine_directory(tmp_path / "engines", random_model(1))) as decoder:
        model, backend = decoder.target, decoder.backend
        model.cache.reserve(1, 8)
        model.prefill(0, [3, 1, 4])
        name = f"{kind}_cache.0"
        cache = next(tensor for found, _, tensor in model.cache.tensors(0, 1) if found == name)
        undisturbed = _next_token_logits(decoder)
        for head in range(2):
            for place in range(3 * 2):  # three slots of two numbers
                number = cache.view(1, offset=head * model.cache.capacity * 2 + place)
                before = backend.read(number)
                backend.write(number, [before[0] + 1])
                assert _next_token_logits(decoder) != undisturbed
                backend.write(number, before)
        assert _next_token_logits(decoder) == undisturbed


def _next_token_logits(decoder: forerun.Decoder) -> list[int]:
    backend = decoder.backend
    input_ids = backend.allocate(ElementType.INT64, (1, 1))
    logits = backend.allocate(ElementType.FLOAT, (1, 1, decoder.target.vocabulary_size))
    backend.write(input_ids, [5])
    decoder.target.run(decoder.target.bind(Shape(0, 1, 1, 1), input_ids=input_ids, logits=logits), [3])
    return backend.read(logits)


def test_a_script_is_said_behind_prompts_of_its_length() -> None:
    model = scripted(script_after(2, [4, 5, 6]), vocabulary=8)
    assert greedy(model, [1, 1], 4) == (4, 5, 6, 0)


def test_a_scripted_draft_is_wrong_where_it_should_be() -> None:
    target = scripted(script_after(1, [4, 1, 6]), vocabulary=8)
    draft = scripted(script_after(1, [4, 1, 6], wrong_at=(0, 1)), vocabulary=8)
    agrees = [argmax(target.logits([7] * n)) == argmax(draft.logits([7] * n)) for n in (1, 2, 3)]
    assert agrees == [False, False, True]
