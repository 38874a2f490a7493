from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.detokenizer import Detokenizer
from forerun.tokenizer import Tokenizer
from helpers.small_tokenizers import ALL_KINDS, FIRST_BYTE_TOKEN, byte_fallback

TEXT = "Hi 你好, 😀👍🏽 e\u0301 \u0645\u0631\u062d\u0628\u0627 �.\n"
KINDS = {name: Tokenizer(build(), end_tokens=()) for name, build in ALL_KINDS.items()}


def pieces_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_pieces_join_to_the_text_of_all_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    beyond = tokenizer.size + 3  # ids that no token has are decoded as nothing
    tokens = data.draw(st.lists(st.integers(0, beyond), max_size=40))
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_bytes_good_and_bad_join_to_the_text_of_all_tokens(kind: str, data: st.DataObject) -> None:
    """Well-formed characters with bytes lost, doubled or foreign among them: where decoders differ most."""
    tokenizer = KINDS[kind]
    parts = st.sampled_from([character.encode() for character in TEXT])
    noise = st.binary(min_size=1, max_size=2)
    spelled = b"".join(data.draw(st.lists(st.one_of(parts, parts, noise), max_size=15)))
    tokens = byte_tokens(kind, spelled)
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


def byte_tokens(kind: str, spelled: bytes) -> list[int]:
    return [FIRST_BYTE_TOKEN[kind] + byte for byte in spelled]


def test_a_character_is_shown_with_its_last_byte_and_not_before() -> None:
    detokenizer = Detokenizer(KINDS["byte level"])
    shown = ""
    spelled = TEXT.encode()
    for end, token in enumerate(byte_tokens("byte level", spelled), 1):
        shown += detokenizer.push(token)
        assert shown == spelled[:end].decode(errors="ignore")
    assert detokenizer.flush() == ""


def test_an_unfinished_character_comes_out_at_the_flush() -> None:
    first_bytes = byte_tokens("byte level", "😀".encode()[:3])
    assert pieces_of(KINDS["byte level"], first_bytes) == ["", "", "", "�"]


def test_a_bad_byte_is_shown_as_soon_as_it_is_certain() -> None:
    assert pieces_of(KINDS["byte level"], byte_tokens("byte level", b"\xff\xe4A")) == ["�", "", "�A", ""]


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    tokenizer = KINDS["byte fallback"]
    good, bad = (byte_tokens("byte fallback", run) for run in ("你".encode(), "你".encode() + b"\xff"))
    letter = tokenizer.encode("a")
    assert pieces_of(tokenizer, good + letter) == ["", "", "", "你a", ""]
    assert pieces_of(tokenizer, bad + letter) == ["", "", "", "", "����a", ""]


def test_text_that_the_next_token_may_rewrite_waits_for_the_flush() -> None:
    tokenizer = KINDS["looking back"]
    first, second, other = range(3)
    assert tokenizer.decode([first, second]) == "X"
    assert pieces_of(tokenizer, [other, first, second]) == ["", "", "", "cX"]


def test_a_leading_space_is_dropped_at_the_very_start_only() -> None:
    token = byte_fallback().token_to_id
    special, word = token("<s>"), token("▁a")
    assert pieces_of(KINDS["byte fallback"], [word, special, word, word]) == ["a", "", " a", " a", ""]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "looking back"])
def test_words_are_shown_as_they_come(kind: str) -> None:
    """Whatever may be held, it is bounded: the text keeps up with the tokens."""
    tokenizer = KINDS[kind]
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.size)}
    word = next(token for token in reversed(texts) if texts[token].isascii() and texts[token].strip())
    assert all(pieces_of(tokenizer, [word] * 5)[:-1])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "looking back"])
def test_tokens_are_decoded_a_bounded_number_of_times(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(ALL_KINDS[kind](), end_tokens=())
    decoded = 0
    whole = tokenizer.decode

    def counted(tokens: Sequence[int], *, skip_special: bool = True) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return whole(tokens, skip_special=skip_special)

    monkeypatch.setattr(tokenizer, "decode", counted)
    tokens = [token % tokenizer.size for token in range(0, 3_000, 7)] + [2] * 1_000
    pieces_of(tokenizer, tokens)
    assert decoded <= 4 * len(tokens)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_smollm2_pieces_join_to_the_text_of_all_tokens(smollm2_tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, smollm2_tokenizer.size - 1), max_size=40))
    assert "".join(pieces_of(smollm2_tokenizer, tokens)) == smollm2_tokenizer.decode(tokens)


def test_smollm2_text_survives_the_round_trip(smollm2_tokenizer: Tokenizer) -> None:
    assert "".join(pieces_of(smollm2_tokenizer, smollm2_tokenizer.encode(TEXT))) == TEXT


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path) -> Tokenizer:
    from forerun_export.tokenizers_from_gguf import source_tokenizer

    source = source_tokenizer(smollm2_gguf)
    return Tokenizer(source.tokenizer, end_tokens=source.end_tokens)
