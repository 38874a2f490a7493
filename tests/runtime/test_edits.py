"""What is edited at a place: as Hugging Face's processors have it, be its tokens committed or drafted."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hugging_face

from forerun import Request
from forerun.edits import BANNED, Edit, EditRules, PlaceEdits, SequenceEdits
from forerun.oracle import edited
from helpers.reference import edited_logits

VOCABULARY = 6  # few, so that repetitions are many
END, OTHER_END = 4, 5
LIMIT = 40


def places(rules: EditRules, prompt: Sequence[int], output: Sequence[int], drafted: int) -> PlaceEdits:
    """The edits behind prompt and output, of which the last `drafted` tokens are not committed."""
    sequence = SequenceEdits(rules, prompt, length_limit=LIMIT)
    committed = len(output) - drafted
    for token in output[:committed]:
        sequence.commit(token)
    return sequence.at(output[committed:])


def applied(place: PlaceEdits, logits: Sequence[float]) -> list[float]:
    return edited(logits, place.tokens, only=place.only)


def random_logits(rng: random.Random) -> list[float]:
    """float32 numbers of both signs, one of them 0."""
    logits = torch.tensor([rng.gauss(0, 2) for _ in range(VOCABULARY)])
    logits[rng.randrange(VOCABULARY)] = 0.0
    return logits.tolist()


def repetitive(rng: random.Random, length: int) -> list[int]:
    return rng.choices(range(VOCABULARY), weights=[8, 4, 1, 4, 1, 1], k=length)


# Against Hugging Face transformers

Processors = Callable[[int], list[Any]]
"""From the prompt's length to the processors that say the same."""

WORDS = ((2,), (0, 1), (3, 3, 3), (1, 0, 2, 3, 0, 1))
KINDS: dict[str, tuple[EditRules, Processors]] = {
    "repetition penalty": (
        EditRules(repetition_penalty=1.7),
        lambda prompt: [hugging_face.RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "repetition bonus": (
        EditRules(repetition_penalty=0.6),
        lambda prompt: [hugging_face.RepetitionPenaltyLogitsProcessor(0.6)],
    ),
    **{
        f"no repeated {size}-gram": (
            EditRules(no_repeat_ngram=size),
            lambda prompt, size=size: [hugging_face.NoRepeatNGramLogitsProcessor(size)],
        )
        for size in (1, 2, 3, 4)
    },
    "bad words": (
        EditRules(bad_words=WORDS),
        lambda prompt: [hugging_face.NoBadWordsLogitsProcessor([list(word) for word in WORDS])],
    ),
    "no end yet": (
        EditRules(min_new_tokens=3, end_tokens=frozenset([END, OTHER_END])),
        lambda prompt: [hugging_face.MinNewTokensLengthLogitsProcessor(prompt, 3, [END, OTHER_END])],
    ),
    "bias": (
        EditRules(bias={1: -2.5, 3: 0.5, 4: -math.inf}),
        lambda prompt: [hugging_face.SequenceBiasLogitsProcessor({(1,): -2.5, (3,): 0.5, (4,): -math.inf})],
    ),
    "all together": (
        EditRules(
            bias={0: 1.5, 1: -2.5},
            repetition_penalty=1.3,
            no_repeat_ngram=3,
            bad_words=((3, 3), (0, 1, 2)),
            min_new_tokens=2,
            end_tokens=frozenset([END]),
        ),
        lambda prompt: [
            hugging_face.SequenceBiasLogitsProcessor({(0,): 1.5, (1,): -2.5}),
            hugging_face.RepetitionPenaltyLogitsProcessor(1.3),
            hugging_face.NoRepeatNGramLogitsProcessor(3),
            hugging_face.NoBadWordsLogitsProcessor([[3, 3], [0, 1, 2]]),
            hugging_face.MinNewTokensLengthLogitsProcessor(prompt, 2, END),
        ],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_edits_are_those_of_hugging_face_at_committed_and_at_drafted_places(kind: str) -> None:
    rules, processors = KINDS[kind]
    rng = random.Random(kind)
    edited_places = 0
    for _ in range(60):
        # Hugging Face leaves out a bad word that is as long as the text with its last token: texts are longer here.
        prompt, output = (repetitive(rng, rng.randint(*length)) for length in ((6, 9), (0, 12)))
        logits = random_logits(rng)
        theirs = torch.tensor([logits])
        for processor in processors(len(prompt)):
            theirs = processor(torch.tensor([[*prompt, *output]]), theirs)
        for drafted in range(len(output) + 1):
            ours = applied(places(rules, prompt, output, drafted), logits)
            assert ours == pytest.approx(theirs[0].tolist(), rel=1e-6, abs=1e-6)
            edited_places += ours != logits
    assert edited_places > 10  # or the contexts show nothing


# Against definitions


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (0.4, 0.3), (-1.0, -0.5)])
def test_presence_is_subtracted_once_and_frequency_for_each_time_in_the_output(
    presence: float, frequency: float
) -> None:
    rules = EditRules(presence_penalty=presence, frequency_penalty=frequency)
    prompt, output = [0, 0, 5], [1, 2, 1, 1, 3, 2]
    logits = [0.5] * VOCABULARY
    expected = [0.5 - (presence + frequency * count if count else 0.0) for count in (0, 3, 2, 1, 0, 0)]
    for drafted in range(len(output) + 1):
        assert applied(places(rules, prompt, output, drafted), logits) == pytest.approx(expected)


def test_a_bad_word_is_banned_where_its_beginning_has_just_been_said_and_nowhere_else() -> None:
    rules = EditRules(bad_words=((1, 2, 3),))
    assert set(places(rules, [0], [1, 2], 1).tokens) == {3}
    assert set(places(rules, [1], [2], 1).tokens) == {3}  # begun in the prompt
    for output in ([1], [2], [1, 2, 0], [0, 2], [1, 2, 3]):
        assert places(rules, [0], output, 1).tokens == {}


@pytest.mark.parametrize("drafted", range(5))
def test_a_bad_word_longer_than_the_drafted_run_is_found_in_what_was_committed(drafted: int) -> None:
    word = (1, 2, 3, 1, 2, 3, 0)
    rules = EditRules(bad_words=(word,))
    assert set(places(rules, [5], [4, *word[:-1]], drafted).tokens) == {0}


def test_a_bad_word_longer_than_all_that_was_said_bans_nothing() -> None:
    rules = EditRules(bad_words=((1,) * 30,))
    for drafted in range(4):
        assert places(rules, [1], [1, 1, 1], drafted).tokens == {}


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ([1, 2, 3, 0, 1, 2], "both times committed"),
        ([0, 1, 2, 3, 1, 2], "the first begins in the prompt"),
    ],
)
@pytest.mark.parametrize("drafted", range(6))
def test_an_n_gram_is_found_wherever_the_draft_begins(said: list[int], where: str, drafted: int) -> None:
    # With 5 or 4 drafted tokens the first [1, 2, 3] lies in the draft wholly, with 3 its end does.
    rules = EditRules(no_repeat_ngram=3)
    assert set(places(rules, said[:1], said[1:], min(drafted, len(said) - 1)).tokens) == {3}, where


@pytest.mark.parametrize("drafted", range(4))
def test_of_1_grams_every_token_said_is_banned(drafted: int) -> None:
    assert set(places(EditRules(no_repeat_ngram=1), [0], [1, 2, 3], drafted).tokens) == {0, 1, 2, 3}


def test_an_n_gram_may_overlap_itself() -> None:
    assert set(places(EditRules(no_repeat_ngram=3), [1], [1, 1], 2).tokens) == {1}


def test_an_infinite_bias_leaves_only_its_tokens_with_logits_of_their_own() -> None:
    rules = EditRules(bias={1: math.inf, 3: math.inf, 2: 7.0, 0: -math.inf}, repetition_penalty=2.0)
    logits = [4.0, 1.0, 2.0, 3.0, 5.0, 6.0]
    ruled_out = -math.inf
    found = applied(places(rules, [3, 2], [4], 1), logits)
    assert found == [ruled_out, 1.0, ruled_out, 1.5, ruled_out, ruled_out]


def test_a_ban_beats_an_infinite_bias() -> None:
    rules = EditRules(bias={1: math.inf, 3: math.inf}, bad_words=((3,),))
    assert applied(places(rules, [0], [], 0), [0.0] * VOCABULARY)[1:4] == [0.0, -math.inf, -math.inf]


def test_bans_that_meet_leave_nothing() -> None:
    rules = EditRules(bias={END: math.inf}, min_new_tokens=2, end_tokens=frozenset([END]))
    for output, expected in (([], -math.inf), ([1], -math.inf), ([1, 1], 0.5)):
        assert max(applied(places(rules, [0], output, len(output)), [0.5] * VOCABULARY)) == expected


@pytest.mark.parametrize("drafted", range(4))
def test_the_end_is_forced_at_the_last_place_alone_and_beats_every_ban(drafted: int) -> None:
    rules = EditRules(
        forced_end=END, bias={END: -math.inf}, min_new_tokens=9, end_tokens=frozenset([END]), bad_words=((END,),)
    )
    output = [1] * (LIMIT - 3)
    assert places(rules, [0, 0], output, drafted) == PlaceEdits({END: Edit()}, only=True)
    assert places(rules, [0, 0], output[1:], drafted).tokens == {END: Edit(shift=BANNED)}


def test_rules_that_edit_nothing_are_told_apart() -> None:
    assert EditRules(end_tokens=frozenset([1])).empty
    changed = ({"min_new_tokens": 1}, {"forced_end": 1}, {"bias": {1: 0.5}}, {"no_repeat_ngram": 1})
    assert not any(EditRules(**change).empty for change in changed)


# Committed, drafted or computed afresh

tokens = st.integers(0, VOCABULARY - 1)
words = st.lists(tokens, min_size=1, max_size=5).map(tuple)
numbers = st.sampled_from([0.0, 0.0, -1.5, 0.3, 2.0])
requests = st.builds(
    Request.of,
    st.lists(tokens, min_size=1, max_size=8),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.8]),
    presence_penalty=numbers,
    frequency_penalty=numbers,
    no_repeat_ngram=st.integers(0, 4),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-math.inf, math.inf, -2.0, 2.0]), max_size=3),
    bad_words=st.lists(words, max_size=3),
    min_new_tokens=st.integers(0, 6),
    force_end=st.booleans(),
)


def rules_of(request: Request) -> EditRules:
    controls = request.controls
    return EditRules(
        repetition_penalty=controls.repetition_penalty,
        presence_penalty=controls.presence_penalty,
        frequency_penalty=controls.frequency_penalty,
        no_repeat_ngram=controls.no_repeat_ngram,
        bias=controls.logit_bias,
        bad_words=controls.bad_words,
        min_new_tokens=controls.min_new_tokens,
        end_tokens=frozenset([END, OTHER_END]),
        forced_end=END if controls.force_end else None,
    )


@settings(deadline=None, max_examples=150)
@given(
    request_=requests,
    output=st.lists(tokens, max_size=10),
    room=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_every_split_into_committed_and_drafted_gives_the_edits_of_their_definitions(
    request_: Request, output: list[int], room: int, seed: int
) -> None:
    prompt, logits = request_.prompt, random_logits(random.Random(seed))
    sequence = SequenceEdits(rules_of(request_), prompt, length_limit=len(prompt) + len(output) + room)
    expected = [
        edited_logits(
            logits,
            request_,
            output[:said],
            ends=[END, OTHER_END],
            last=room == 1 and said == len(output),
        )
        for said in range(len(output) + 1)
    ]
    for committed in range(len(output) + 1):
        for said in range(committed, len(output) + 1):
            found = applied(sequence.at(output[committed:said]), logits)
            assert found == pytest.approx(expected[said], rel=1e-12)
        if committed < len(output):
            sequence.commit(output[committed])
