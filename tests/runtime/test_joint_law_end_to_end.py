"""The whole runtime emits tokens with the target's joint law, within rounds and across their boundaries.

Thousands of rows with seeds 0, 1, 2, .. start from one prompt; models depend on the whole context through their
caches; the law of three tokens in a row is enumerated and compared with counts. The power of the comparison: the
same number of rows, decoded with a graph that draws from p after a rejection, is refused with p < 1e-12.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx_ir
import pytest

import forerun
from forerun import Decoder, Generation, Request
from forerun.oracle import Table, Tokens, law_of, plain_law
from forerun_export.certify.wrong_graphs import draw_from_p
from forerun_export.sampling import sampling_model
from helpers.joint_law import p_value
from helpers.table_models import TableModel, engine_directory, random_model, sampling_graphs

VOCABULARY = 6
TEMPERATURE = 0.8
POSITIONS = 3
ROWS = 4_000
BATCH = 500
SIGNIFICANCE = 1e-3

CONTEXT = 10
TARGET = random_model(21, vocabulary=VOCABULARY, context=CONTEXT, spread=1.0)
# Unrelated to the target: about half of what it proposes is rejected.
DRAFT = random_model(22, vocabulary=VOCABULARY, context=CONTEXT, spread=1.0)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    folder = tmp_path_factory.mktemp("right") / "engines"
    with forerun.open(engine_directory(folder, TARGET, DRAFT, batch=BATCH)) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """A decoder whose verification draws from p after a rejection."""
    folder = tmp_path_factory.mktemp("wrong")
    sampling = Path(shutil.copytree(sampling_graphs(VOCABULARY), folder / "sampling"))
    model = sampling_model(draw_from_p, VOCABULARY)
    onnx_ir.save(model, sampling / "verify-residual.onnx")
    engines = engine_directory(folder / "engines", TARGET, DRAFT, batch=BATCH, sampling=sampling)
    with forerun.open(engines) as decoder:
        yield decoder


def table_of(model: TableModel) -> Table:
    return lambda context: law_of(model.logits(context), TEMPERATURE)


def law_behind(prompt: list[int], skipped: int) -> dict[Tokens, float]:
    """The exact law of the POSITIONS tokens after the first `skipped` ones."""
    law: dict[Tokens, float] = {}
    joint = plain_law(table_of(TARGET), positions=skipped + POSITIONS, context=tuple(prompt))
    for tokens, probability in joint.items():
        law[tokens[skipped:]] = law.get(tokens[skipped:], 0.0) + probability
    return law


def generations(decoder: Decoder, prompt: list[int], draft_length: int, tokens: int, law: str) -> list[Generation]:
    controls = {
        "temperature": TEMPERATURE,
        "draft_length": draft_length,
        "max_new_tokens": tokens,
        "law": law,
    }
    return decoder.generate([Request.of(prompt, seed=seed, **controls) for seed in range(ROWS)])


def counts(decoded: list[Generation], skipped: int = 0) -> Counter[Tokens]:
    return Counter(one.token_ids[skipped : skipped + POSITIONS] for one in decoded)


@pytest.mark.parametrize("law", ["residual", "block"])
@pytest.mark.parametrize(
    ("prompt", "draft_length", "extra_tokens"),
    [
        ([3], 1, 0),
        ([1, 4], 2, 2),  # K is 2 from the first round to the last that matters
        ([5, 0, 2, 1, 3], 3, 0),  # K shrinks to the room that is left: 2, then 1 or 0
        ([1] * (CONTEXT - 5), 4, 50),  # the context's end is what shrinks K
    ],
)
def test_speculative_decoding_has_the_joint_law_of_the_target(
    decoder: Decoder, prompt: list[int], draft_length: int, extra_tokens: int, law: str
) -> None:
    decoded = generations(decoder, prompt, draft_length, POSITIONS + extra_tokens, law)
    assert 0.2 < sum(one.stats.accepted for one in decoded) / sum(one.stats.proposed for one in decoded) < 0.8
    assert p_value(counts(decoded), law_behind(prompt, 0)) > SIGNIFICANCE


def test_tokens_further_on_have_the_targets_law_wherever_rounds_began(decoder: Decoder) -> None:
    decoded = generations(decoder, [2, 5], 2, 2 + POSITIONS, "block")
    assert p_value(counts(decoded, skipped=2), law_behind([2, 5], 2)) > SIGNIFICANCE


@pytest.mark.parametrize("law", ["residual", "coupled"])
def test_plain_decoding_has_the_law_of_the_target(decoder: Decoder, law: str) -> None:
    decoded = generations(decoder, [3], 0, POSITIONS, law)
    assert p_value(counts(decoded), law_behind([3], 0)) > SIGNIFICANCE


@pytest.mark.parametrize("draft_length", [1, 2])
def test_so_many_rows_expose_a_rule_that_draws_from_the_target_after_a_rejection(
    biased: Decoder, draft_length: int
) -> None:
    decoded = generations(biased, [3], draft_length, POSITIONS, "residual")
    assert p_value(counts(decoded), law_behind([3], 0)) < 1e-12
