"""Under every control speculative decoding says what plain decoding says, and what plain Python says.

Greedy and coupled output is that of plain decoding, token for token. Residual and block output is, token for token,
what their definitions give for the same uniforms and the same edited and filtered laws; `test_controls_in_law` adds
that this has the target's law.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forerun import Decoder, Request
from helpers.reference import NothingLeftError, decoded
from helpers.table_models import DRAFT_LENGTH, DRAFTS, TablePair, table_pair

VOCABULARY = 8
END = 6
ENDS = [END, 7]
Opened = dict[str, tuple[TablePair, Decoder]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A decoder for each kind of draft."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs = {draft: table_pair(folder / draft, draft=draft, end_tokens=ENDS) for draft in DRAFTS}
    decoders = {draft: (pair, pair.open()) for draft, pair in pairs.items()}
    yield decoders
    for _, decoder in decoders.values():
        decoder.close()


CONTROLS: dict[str, dict[str, Any]] = {
    "no control": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.2},
    "all filters": {"top_k": 3, "top_p": 0.8, "min_p": 0.3},
    "repetition penalty": {"repetition_penalty": 2.5},
    "presence penalty": {"presence_penalty": 4.0},
    "frequency penalty": {"frequency_penalty": 1.5},
    "negative penalties": {"presence_penalty": -2.0, "frequency_penalty": -1.0, "repetition_penalty": 0.4},
    "no repeated 2-gram": {"no_repeat_ngram": 2},
    "no repeated 3-gram": {"no_repeat_ngram": 3, "top_k": 2, "logit_bias": {0: 2.0, 3: 2.0}},
    "logit bias": {"logit_bias": {0: 3.0, 1: -3.0, 2: -math.inf}},
    "only some tokens": {"logit_bias": {1: math.inf, 3: math.inf, 4: math.inf}},
    "bad words": {"bad_words": [[0], [1, 2], [3, 3], [4, 5, 4], [2, 1, 2, 1]]},
    "no end yet": {"min_new_tokens": 9, "logit_bias": {END: 6.0}},
    "forced end": {"force_end": True, "logit_bias": {END: -math.inf}},
    "stop tokens": {"stop_tokens": [3], "min_new_tokens": 4},
}
LAWS = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "law": "coupled"},
    "residual": {"temperature": 1.0, "law": "residual"},
    "block": {"temperature": 1.0, "law": "block"},
}
NEIGHBOURS = [
    Request.of([2, 7, 1], temperature=1.3, seed=8, law="block", top_p=0.7, frequency_penalty=1.0, max_new_tokens=9),
    Request.of([4] * 9, temperature=0.8, seed=9, law="coupled", no_repeat_ngram=3, draft_length=2, logprobs=3),
    Request.of([1, 2], bad_words=[[5]], logit_bias={6: math.inf, 5: math.inf}, max_new_tokens=20, draft_length=6),
]


def changed(request: Request, **controls: Any) -> Request:
    return replace(request, controls=replace(request.controls, **controls))


def a_ragged_batch(control: str, law: str) -> list[Request]:
    prompts = [[1], [2, 5, 2], [place % 6 for place in range(11)], [3, 0] * 8]
    options = {**LAWS[law], **CONTROLS[control]}
    return [
        Request.of(prompt, seed=10 + row, max_new_tokens=14, draft_length=1 + 2 * row, **options)
        for row, prompt in enumerate(prompts)
    ]


def tokens_of(decoder: Decoder, batch: list[Request]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in decoder.generate(batch)]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("control", CONTROLS)
def test_every_control_is_exact_alone_in_a_ragged_batch_and_with_any_neighbours(
    opened: Opened, control: str, law: str
) -> None:
    pair, decoder = opened["good"]
    batch = a_ragged_batch(control, law)
    expected = [decoded(pair.target, pair.draft, request, ends=ENDS) for request in batch]
    assert tokens_of(decoder, batch) == expected
    crowd = tokens_of(decoder, [NEIGHBOURS[0], batch[1], *NEIGHBOURS[1:], batch[2]])
    assert [crowd[1], crowd[4]] == expected[1:3]
    assert tokens_of(decoder, batch[1:2]) == expected[1:2]


@pytest.mark.parametrize("law", ["greedy", "coupled"])
@pytest.mark.parametrize("control", CONTROLS)
def test_greedy_and_coupled_output_is_plain_output_for_every_draft_and_draft_length(
    opened: Opened, control: str, law: str
) -> None:
    batch = a_ragged_batch(control, law)
    plain = tokens_of(opened["good"][1], [changed(request, draft="none") for request in batch])
    for draft, draft_length in (("good", 1), ("equal", 2), ("contrary", 4), ("good", DRAFT_LENGTH)):
        found = tokens_of(opened[draft][1], [changed(one, draft_length=draft_length) for one in batch])
        assert found == plain


@pytest.mark.parametrize("control", [control for control in CONTROLS if control != "no control"])
def test_every_control_changes_what_these_requests_say(opened: Opened, control: str) -> None:
    pair, _ = opened["good"]
    batch = a_ragged_batch(control, "coupled")
    said = [decoded(pair.target, pair.draft, one, ends=ENDS) for one in batch]
    for name in CONTROLS[control]:
        without = [changed(one, **{name: getattr(Request.of([]).controls, name)}) for one in batch]
        assert [decoded(pair.target, pair.draft, one, ends=ENDS) for one in without] != said, name


# Any mixture


tokens = st.integers(0, VOCABULARY - 1)
penalties = st.sampled_from([0.0, 0.0, -0.8, 0.5, 2.0])
biases = st.sampled_from([-math.inf, -3.0, 1.0, 4.0])


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A prompt with any controls; about every other control is on."""

    def maybe(off: Any, on: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.just(off), on))

    law = draw(st.sampled_from(["residual", "block", "coupled", "coupled", "auto"]))
    max_new_tokens = draw(st.integers(1, 16))
    return Request.of(
        draw(st.lists(tokens, min_size=1, max_size=9)),
        law=law,
        temperature=0.0 if law == "auto" else draw(st.sampled_from([0.4, 1.0, 1.0, 3.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_new_tokens=max_new_tokens,
        draft=maybe("auto", st.just("none")) if draw(st.booleans()) else "auto",
        draft_length=draw(st.integers(0, DRAFT_LENGTH)),
        top_k=maybe(0, st.integers(1, VOCABULARY + 1)),
        top_p=maybe(1.0, st.sampled_from([0.05, 0.5, 0.9])),
        min_p=maybe(0.0, st.sampled_from([0.05, 0.3])),
        repetition_penalty=maybe(1.0, st.sampled_from([0.5, 1.3, 3.0])),
        presence_penalty=draw(penalties),
        frequency_penalty=draw(penalties),
        no_repeat_ngram=maybe(0, st.integers(2, 4)),
        logit_bias=maybe({}, st.dictionaries(tokens, biases, max_size=3)),
        bad_words=maybe((), st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=3)),
        min_new_tokens=maybe(0, st.integers(0, max_new_tokens)),
        force_end=draw(st.booleans()),
        stop_tokens=maybe((), st.lists(tokens, max_size=1)),
        logprobs=maybe(None, st.integers(0, 4)),
    )


@settings(deadline=None, max_examples=60, derandomize=True)
@given(draft=st.sampled_from(sorted(DRAFTS)), batch=st.lists(requests(), min_size=1, max_size=5))
def test_any_mixture_of_controls_laws_and_draft_lengths_is_exact_in_every_row(
    opened: Opened, draft: str, batch: list[Request]
) -> None:
    pair, decoder = opened[draft]
    try:
        expected = [decoded(pair.target, pair.draft, request, ends=ENDS) for request in batch]
    except NothingLeftError:
        assume(False)
    generations = decoder.generate(batch)
    assert [one.token_ids for one in generations] == expected
    for generation in generations:
        stats = generation.stats
        assert stats.emitted == len(generation.token_ids)
        assert stats.emitted == stats.accepted + stats.corrections + stats.bonuses - stats.truncated
    plain = decoder.generate([changed(request, draft="none") for request in batch])
    for request, one, said in zip(batch, plain, expected, strict=True):
        if request.controls.law_name in ("greedy", "coupled"):
            assert one.token_ids == said
