"""Losslessness of the whole loop: what is emitted is what plain Python says, whatever proposes and with whom."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import Decoder, Generation, Request
from forerun.engine import ElementType, Tensor
from helpers.hooked_backend import open_hooked
from helpers.reference import greedy, sampled
from helpers.table_models import DRAFT_LENGTH, DRAFTS, TablePair, table_pair

VOCABULARY = 8


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[TablePair, Decoder]]]:
    """A decoder for each kind of draft."""
    pairs = {draft: table_pair(tmp_path_factory.mktemp(draft) / "engines", draft=draft) for draft in DRAFTS}
    decoders = {draft: (pair, pair.open()) for draft, pair in pairs.items()}
    yield decoders
    for _, decoder in decoders.values():
        decoder.close()


prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)
draft_lengths = st.integers(0, DRAFT_LENGTH)
drafts = st.sampled_from(sorted(DRAFTS))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A prompt with controls of its own; each sampled one has a seed."""
    return Request.of(
        draw(prompts),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5])),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_new_tokens=draw(st.integers(1, 25)),
        draft=draw(st.sampled_from(["auto", "auto", "none"])),
        draft_length=draw(draft_lengths),
        law="residual",
    )


def expected(pair: TablePair, request: Request) -> tuple[int, ...]:
    controls, prompt = request.controls, request.prompt
    if controls.temperature == 0:
        return greedy(pair.target, prompt, controls.max_new_tokens)
    return sampled(
        pair.target,
        pair.draft,
        prompt,
        controls.max_new_tokens,
        temperature=controls.temperature,
        seed=controls.seed,
        draft_length=0 if controls.draft == "none" else controls.draft_length,
    )


def check_counts(generation: Generation, draft_length: int) -> None:
    stats = generation.stats
    by_position = stats.accepted_by_position
    assert stats.emitted == len(generation.token_ids)
    assert stats.emitted == stats.accepted + stats.corrections + stats.bonuses - stats.truncated
    assert stats.rounds == stats.corrections + stats.bonuses
    assert stats.accepted <= stats.proposed <= stats.rounds * draft_length
    assert sum(by_position) == stats.accepted
    assert sorted(by_position, reverse=True) == by_position
    assert len(by_position) <= draft_length


@pytest.mark.parametrize("draft_length", range(DRAFT_LENGTH + 1))
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_speculative_output_is_plain_output(
    opened: dict[str, tuple[TablePair, Decoder]], draft: str, draft_length: int
) -> None:
    pair, decoder = opened[draft]
    for size in range(1, 9):
        batch = [[(7 * row + place) % VOCABULARY for place in range(1 + 3 * row)] for row in range(size)]
        plain = decoder.generate(batch, max_new_tokens=20, draft="none")
        speculative = decoder.generate(batch, max_new_tokens=20, draft_length=draft_length)
        assert [one.token_ids for one in plain] == [greedy(pair.target, prompt, 20) for prompt in batch]
        assert [one.token_ids for one in speculative] == [one.token_ids for one in plain]


@settings(deadline=None, max_examples=60)
@given(draft=drafts, batch=st.lists(requests(), min_size=1, max_size=8))
def test_rows_of_any_batch_say_what_they_say_alone(
    opened: dict[str, tuple[TablePair, Decoder]], draft: str, batch: list[Request]
) -> None:
    pair, decoder = opened[draft]
    for request, generation in zip(batch, decoder.generate(batch), strict=True):
        assert generation.token_ids == expected(pair, request)
        check_counts(generation, request.controls.draft_length)


@settings(deadline=None, max_examples=20)
@given(draft=drafts, request_=requests(), others=st.lists(requests(), max_size=3))
def test_a_seed_gives_the_same_tokens_streamed_or_not_and_after_any_other_request(
    opened: dict[str, tuple[TablePair, Decoder]], draft: str, request_: Request, others: list[Request]
) -> None:
    _, decoder = opened[draft]
    alone = decoder.generate(request_)
    if others:
        decoder.generate(others)
    streamed = [token for chunk in decoder.stream(request_) for token in chunk.token_ids]
    assert tuple(streamed) == alone.token_ids
    assert decoder.generate(request_).token_ids == alone.token_ids


def test_two_decoders_of_one_directory_agree(opened: dict[str, tuple[TablePair, Decoder]]) -> None:
    pair, decoder = opened["good"]
    controls = {"temperature": 1.0, "seed": 5, "max_new_tokens": 30}
    with pair.open() as other:
        assert other.generate([1, 2], **controls).token_ids == decoder.generate([1, 2], **controls).token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_equal_to_the_target_is_always_accepted(
    opened: dict[str, tuple[TablePair, Decoder]], temperature: float
) -> None:
    _, decoder = opened["equal"]
    for draft_length in range(1, DRAFT_LENGTH + 1):
        stats = decoder.generate(
            [1, 2],
            max_new_tokens=60,
            temperature=temperature,
            seed=3,
            draft_length=draft_length,
            law="residual",
        ).stats
        assert stats.accepted == stats.proposed > 0
        assert stats.corrections == 0


def test_temperatures_that_float32_cannot_hold_are_taken_to_their_limits(
    opened: dict[str, tuple[TablePair, Decoder]],
) -> None:
    pair, decoder = opened["good"]
    assert decoder.generate([1], temperature=1e-300, max_new_tokens=20).token_ids == greedy(pair.target, [1], 20)
    flat = decoder.generate([1], temperature=1e300, seed=1, max_new_tokens=60, draft_length=4)
    assert flat.stats.accepted == flat.stats.proposed  # both laws are uniform
    assert len(set(flat.token_ids)) == VOCABULARY


@pytest.mark.parametrize("draft_length", [1, 2, 5, 8])
def test_nothing_accepted_in_any_round_still_gives_a_token_a_round(
    opened: dict[str, tuple[TablePair, Decoder]], draft_length: int
) -> None:
    pair, decoder = opened["contrary"]
    generation = decoder.generate([1, 2], max_new_tokens=20, draft_length=draft_length)
    stats = generation.stats
    assert generation.token_ids == greedy(pair.target, [1, 2], 20)
    assert (stats.rounds, stats.accepted, stats.corrections, stats.bonuses) == (
        20,
        0,
        19,
        1,
    )  # K = 0 at the end


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_host_reads_nothing_but_the_few_integers_of_a_round(
    opened: dict[str, tuple[TablePair, Decoder]], draft: str
) -> None:
    pair, _ = opened[draft]
    decoder, backend = open_hooked(pair.path)
    read: list[Tensor] = []
    backend.hook = lambda operation, tensor: read.append(tensor) if operation == "read" and tensor else None
    with decoder:
        for draft_length in range(DRAFT_LENGTH + 1):
            for temperature in (0.0, 1.0):
                read.clear()
                batch = [[1, 2], [3], [4, 5, 6]]
                decoder.generate(batch, max_new_tokens=12, temperature=temperature, draft_length=draft_length)
                assert all(tensor.element_type is ElementType.INT64 for tensor in read)
                assert max(tensor.size for tensor in read) <= len(batch) * (draft_length + 1)


@pytest.mark.parametrize("draft_length", [0, 1, 4])
def test_bytes_to_the_host_depend_on_the_draft_length_and_not_on_the_vocabulary(
    tmp_path_factory: pytest.TempPathFactory, draft_length: int
) -> None:
    bytes_a_round = set()
    for vocabulary in (8, 200):
        pair = table_pair(tmp_path_factory.mktemp("size") / "engines", vocabulary=vocabulary, draft="equal")
        with pair.open() as decoder:
            controls = {"max_new_tokens": 5 * (draft_length + 1), "draft_length": draft_length}
            bytes_a_round.add(decoder.generate([1, 2], **controls).stats.host_bytes_per_round)
    tokens_and_counts = draft_length + 3 if draft_length else 1  # K + 1 tokens, accepted, next; or the one token
    assert bytes_a_round == {8 * tokens_and_counts}
