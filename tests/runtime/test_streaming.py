"""Text as it comes: valid, nothing twice, nothing lost, whatever the rounds cut apart."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forerun
from forerun import Chunk, Generation
from helpers.small_tokenizers import byte_level
from helpers.table_models import byte_tokens, engine_directory, script_after, scripted

TOKENIZER = byte_level()
VOCABULARY = TOKENIZER.get_vocab_size()
END = TOKENIZER.token_to_id("<|end|>")
TEXTS = [
    "héllo wörld",
    "你好, 世界",
    "😀👍🏽 \U0001f469\u200d\U0001f469\u200d\U0001f467 ok",
    "e\u0301\u0323 a\u0308",
    "naïve — “quotes”…",
]


def speak(folder: Path, tokens: list[int], *, wrong_at: list[int] | None = None) -> Path:
    """Engines that say these tokens, with a draft that is wrong at some of them."""
    context = len(tokens) + 10
    target, draft = (
        scripted(script_after(1, tokens, wrong_at=wrong), vocabulary=VOCABULARY, context=context)
        for wrong in ([], wrong_at or [])
    )
    return engine_directory(folder, target, draft, tokenizer=TOKENIZER, end_tokens=[END])


def stream(decoder: forerun.Decoder, **controls: object) -> tuple[list[Chunk], Generation]:
    chunks, generator = [], decoder.stream([1], **controls)
    while True:
        try:
            chunks.append(next(generator))
        except StopIteration as end:
            return chunks, end.value


@pytest.mark.parametrize("draft_length", [0, 1, 2, 5])
@pytest.mark.parametrize("text", TEXTS)
def test_characters_cut_by_tokens_and_rounds_are_shown_whole_and_once(
    tmp_path: Path, text: str, draft_length: int
) -> None:
    tokens = byte_tokens(TOKENIZER, text)
    with forerun.open(speak(tmp_path / "engines", [*tokens, END], wrong_at=[3, 4, 9])) as decoder:
        chunks, generation = stream(decoder, draft_length=draft_length)
    assert "".join(chunk.text for chunk in chunks) == generation.text == text
    assert all("\ufffd" not in chunk.text for chunk in chunks)
    assert [token for chunk in chunks for token in chunk.token_ids] == [*tokens, END]
    assert "".join(piece for chunk in chunks for piece in chunk.pieces) == text


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_character_that_the_limit_cuts_is_shown_as_decode_shows_it(tmp_path: Path, cut: int) -> None:
    tokens = byte_tokens(TOKENIZER, "a😀")
    with forerun.open(speak(tmp_path / "engines", tokens)) as decoder:
        chunks, generation = stream(decoder, max_new_tokens=1 + cut, draft_length=2)
        assert generation.text == decoder.tokenizer.decode(tokens[: 1 + cut]) == "a\ufffd"
    assert "".join(chunk.text for chunk in chunks) == generation.text


@pytest.mark.parametrize("draft_length", [0, 1, 3])
def test_a_stop_text_inside_a_character_cut_by_rounds_is_found(tmp_path: Path, draft_length: int) -> None:
    with forerun.open(speak(tmp_path / "engines", byte_tokens(TOKENIZER, "ab 你好 cd"), wrong_at=[5])) as decoder:
        chunks, generation = stream(decoder, stop=["好"], draft_length=draft_length)
    assert generation.text == "".join(chunk.text for chunk in chunks) == "ab 你"
    assert generation.finish_reason == "stop"


def test_text_that_may_become_a_stop_text_waits_and_is_not_shown_twice(tmp_path: Path) -> None:
    with forerun.open(speak(tmp_path / "engines", [*byte_tokens(TOKENIZER, "one STONE"), END])) as decoder:
        chunks, generation = stream(decoder, stop=["STOP"], draft_length=0)
    assert [chunk.text for chunk in chunks] == ["o", "n", "e", " ", "", "", "", "STON", "E", ""]
    assert generation.text == "one STONE"


def test_chunks_tell_accepted_from_corrections_and_bonuses(tmp_path: Path) -> None:
    tokens = byte_tokens(TOKENIZER, "abcdefgh")
    with forerun.open(speak(tmp_path / "engines", tokens, wrong_at=[1, 5])) as decoder:
        chunks, _ = stream(decoder, draft_length=3, max_new_tokens=8)
    assert [(chunk.accepted, len(chunk.rejected), len(chunk.token_ids)) for chunk in chunks] == [
        (1, 2, 2),  # a, then b in place of a wrong one
        (3, 0, 4),  # c d e, and f, which no one had to propose
        (1, 0, 2),  # g, and h: no more room
    ]


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1).filter(lambda token: token != END), min_size=1, max_size=30),
    wrong_at=st.lists(st.integers(0, 30), max_size=8),
    draft_length=st.integers(0, 6),
    stop=st.lists(st.text("abé你 ", min_size=1, max_size=2), max_size=2),
)
def test_any_tokens_stream_to_the_text_that_decoding_them_at_once_gives(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: list[int],
    wrong_at: list[int],
    draft_length: int,
    stop: list[str],
) -> None:
    engines = speak(tmp_path_factory.mktemp("speak") / "engines", tokens, wrong_at=wrong_at)
    with forerun.open(engines) as decoder:
        controls = {"max_new_tokens": len(tokens), "draft_length": draft_length, "stop": stop}
        chunks, generation = stream(decoder, **controls)
        plain = decoder.generate([1], max_new_tokens=len(tokens), draft="none", stop=stop)
        text = decoder.tokenizer.decode(tokens)
    first_stop = min((text.find(one) for one in stop if one in text), default=len(text))
    assert generation.text == "".join(chunk.text for chunk in chunks) == plain.text
    assert generation.token_ids == plain.token_ids
    assert generation.finish_reason == plain.finish_reason
    if "\ufffd" not in text:
        assert generation.text == text[:first_stop]
