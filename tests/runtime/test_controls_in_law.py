"""Under every control the whole runtime emits tokens with the target's joint law, under `residual` and `block`.

Thousands of samples of one request, each with a seed of its own; the law of their whole output, across rounds, is
enumerated in plain Python from the definitions of the controls and compared with counts by a G-test.

The power of the comparison: as many samples of a runtime that is wrong in one place are refused with p < 1e-12, for
each control that the place matters to. Wrong are edits that are made once a round, from the committed tokens alone,
and a ratio whose q is not filtered though proposals are.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from forerun import Decoder, Request
from forerun.edits import PlaceEdits
from forerun.laws import Demands
from forerun.oracle import Tokens
from forerun.row import Row
from forerun.sampling import Sampler, Shaped
from forerun.workspace import RoundTensors
from helpers.joint_law import p_value
from helpers.reference import joint_law
from helpers.table_models import engine_directory, random_model

VOCABULARY, END = 5, 4
SAMPLES = 1_500
SIGNIFICANCE, CERTAIN = 1e-3, 1e-12
LAWS = ["residual", "block"]

CONTEXT = 10
TARGET = random_model(21, vocabulary=VOCABULARY, context=CONTEXT, spread=1.0)
# Unrelated to the target: about half of what it proposes is rejected.
DRAFT = random_model(22, vocabulary=VOCABULARY, context=CONTEXT, spread=1.0)

EDITS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 8.0},
    "frequency penalty": {"frequency_penalty": 2.0},
    "no repeated 2-gram": {"no_repeat_ngram": 2, "logit_bias": {2: 1.5}},
    "bad words": {"bad_words": [[0, 1], [2, 2], [1, 2, 0], [3, 0]]},
    "no end yet": {"min_new_tokens": 2, "logit_bias": {END: 1.5}},
}
FILTERS: dict[str, dict[str, Any]] = {
    "temperature, top-k and top-p": {"temperature": 1.5, "top_k": 3, "top_p": 0.8},
    "min-p": {"min_p": 0.3},
}
CONTROLS: dict[str, dict[str, Any]] = {
    **EDITS,
    **FILTERS,
    "logit bias": {"logit_bias": {0: 1.5, 3: -1.0, 2: float("-inf")}},
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    folder = tmp_path_factory.mktemp("pair") / "engines"
    engines = engine_directory(folder, TARGET, DRAFT, batch=SAMPLES, end_tokens=[END])
    with Decoder(engines) as decoder:
        yield decoder


def request_of(law: str, control: str) -> Request:
    options = {"temperature": 1.0, "max_new_tokens": 3, "draft_length": 2, "seed": 7, **CONTROLS[control]}
    return Request.of([3], law=law, n=SAMPLES, **options)


def counts(decoder: Decoder, request: Request) -> Counter[Tokens]:
    return Counter(one.token_ids for one in decoder.generate([request]))


def fit(observed: Counter[Tokens], request: Request) -> float:
    """How well outputs fit the law of a request: p of the G-test, 0 where one of them cannot be."""
    expected = joint_law(TARGET, request, ends=[END])
    return p_value(observed, expected) if observed.keys() <= expected.keys() else 0.0


def without_control(request: Request, control: str) -> Request:
    default = Request.of([], temperature=1.0).controls
    off = {name: getattr(default, name) for name in CONTROLS[control]}
    return replace(request, controls=replace(request.controls, **off))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("control", CONTROLS)
def test_output_has_the_law_of_the_target_under_the_control_and_not_without(
    decoder: Decoder, control: str, law: str
) -> None:
    request = request_of(law, control)
    observed = counts(decoder, request)
    assert fit(observed, request) > SIGNIFICANCE
    assert fit(observed, without_control(request, control)) < CERTAIN


@pytest.mark.parametrize(("control", "law"), [*zip(EDITS, LAWS * 3, strict=False)])
def test_the_samples_expose_edits_made_once_a_round(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, control: str, law: str
) -> None:
    right = Row.edits_at

    def from_committed_tokens(row: Row, drafted: Sequence[int]) -> PlaceEdits:
        return right(row, ())

    monkeypatch.setattr(Row, "edits_at", from_committed_tokens)
    request = request_of(law, control)
    assert fit(counts(decoder, request), request) < CERTAIN


@pytest.mark.parametrize(("control", "law"), [*zip(FILTERS, LAWS, strict=True)])
def test_the_samples_expose_a_ratio_with_an_unfiltered_q(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, control: str, law: str
) -> None:
    right = Sampler.propose

    def keeping_an_unfiltered_q(sampler: Sampler, shaped: Shaped, tensors: RoundTensors, demands: Demands) -> None:
        right(sampler, shaped, tensors, demands)
        sampler.shape(shaped.side, tensors, replace(demands, filters=False), None)
        copy, size, step = decoder.backend.copy, VOCABULARY, decoder.backend.read(tensors.step)[0]
        for row in range(tensors.rows):
            place = (row * tensors.draft_length + step) * size
            copy(tensors.q.view(size, offset=place), shaped.side.p.view(size, offset=row * size))

    monkeypatch.setattr(Sampler, "propose", keeping_an_unfiltered_q)
    request = request_of(law, control)
    assert fit(counts(decoder, request), request) < CERTAIN
