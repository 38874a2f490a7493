import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ExportError
from forerun.tokenizer import Tokenizer
from forerun_export.gguf_metadata import read_metadata
from forerun_export.source_tokenizers import SourceTokenizer
from forerun_export.tokenizers_from_gguf import source_tokenizer
from helpers.gguf_files import (
    CHATML,
    GPT2,
    NORMAL,
    TOKENS,
    UNUSED,
    USER_DEFINED,
    gpt2_pieces,
    reference_tokens,
    write_gguf,
)

WORDS = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def smollm_pieces(text: str) -> list[str]:
    return [piece for part in regex.findall(r"\p{N}|[^\p{N}]+", text) for piece in regex.findall(GPT2, part)]


def qwen2_pieces(text: str) -> list[str]:
    return regex.findall(WORDS.replace("NUMBER", r"\p{N}"), unicodedata.normalize("NFC", text))


def llama3_pieces(text: str) -> list[str]:
    return regex.findall(WORDS.replace("NUMBER", r"\p{N}{1,3}"), text)


PIECES: dict[str, Callable[[str], list[str]]] = {
    "gpt-2": gpt2_pieces,
    "smollm": smollm_pieces,
    "qwen2": qwen2_pieces,
    "llama-bpe": llama3_pieces,
}


@pytest.fixture(scope="module", params=list(PIECES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, SourceTokenizer]:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", request.param, add_bos_token=False)
    return request.param, source_tokenizer(path)


fragments = st.sampled_from(
    ["12:12:53", "1234567", "½", "٣٤", " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "the", " end", "DON'T",
     "你好", "\uff0c", "é", "e\u0301", "😀", "👍🏽", "!!!", ".", "_x", "\u00a0"]
)  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(parts=st.lists(fragments, max_size=12))
def test_every_text_is_split_and_merged_as_the_reference_does(
    family: tuple[str, SourceTokenizer], parts: list[str]
) -> None:
    pre, source = family
    text = "".join(parts)
    expected = reference_tokens(PIECES[pre](text), ignore_merges=pre == "llama-bpe")
    assert source.tokenizer.encode(text).ids == expected


def test_the_vocabulary_tells_the_families_apart() -> None:
    """Else the test above could not see one pre-tokenizer in place of another."""
    texts = ["12:12:53", "we'll see DON'T", "x\n\n    y", "e\u0301"]
    found = {
        pre: tuple(tuple(reference_tokens(pieces(text), ignore_merges=False)) for text in texts)
        for pre, pieces in PIECES.items()
    }
    assert len(set(found.values())) == len(PIECES)


def test_smollm2_has_the_tokens_that_its_own_tokenizer_gives(smollm2_gguf: Path) -> None:
    tokenizer = source_tokenizer(smollm2_gguf).tokenizer
    assert tokenizer.encode("Hello world! 123").ids == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("Café déjà vu.").ids == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert tokenizer.encode("  multiple   spaces").ids == [216, 2701, 256, 5600]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("12:12:53", ["1", "2", ":", "1", "2", ":", "5", "3"]),
        ("at  12:12:53", ["at", "ĠĠ", "1", "2", ":", "1", "2", ":", "5", "3"]),
        ("a    b", ["a", "ĠĠĠ", "Ġb"]),
        ("x\n\n    y\n", ["x", "ĊĊĠĠĠ", "Ġy", "Ċ"]),
        ("I'm we'll DON'T it's", ["I", "'m", "Ġwe", "'ll", "ĠD", "ON", "'", "T", "Ġit", "'s"]),
        ("你好\uff0c世界", ["ä½", "ł", "å¥", "½", "ï¼Į", "ä\u00b8", "ĸ", "ç", "ķ", "Į"]),
        ("😀👍🏽", ["ðŁ", "ĺ", "Ģ", "ðŁ", "ĳ", "į", "ðŁ", "\u0131", "½"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_smollm2_pieces(smollm2_gguf: Path, text: str, pieces: list[str]) -> None:
    tokenizer = source_tokenizer(smollm2_gguf).tokenizer
    assert tokenizer.encode(text).tokens == pieces
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_smollm2_ends_at_the_turn_and_at_the_document(smollm2_gguf: Path, tmp_path: Path) -> None:
    source = source_tokenizer(smollm2_gguf)
    assert source.end_tokens == (0, 2)
    source.save(tmp_path)
    runtime = Tokenizer.open(
        tmp_path, end_tokens=source.end_tokens, bos_token=source.bos_token, eos_token=source.eos_token
    )
    prompt = runtime.decode(runtime.chat([{"role": "user", "content": "Hi"}]), skip_special=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.startswith("<|im_start|>system\n")


def test_control_tokens_are_special_and_user_defined_ones_are_whole_words(tmp_path: Path) -> None:
    extra = [("<tool>", USER_DEFINED), ("[PAD0]", UNUSED)]
    tokenizer = source_tokenizer(write_gguf(tmp_path / "m.gguf", "qwen2", extra=extra)).tokenizer
    encoding = tokenizer.encode("a <tool> <|im_end|> [PAD0]")
    assert "<tool>" in encoding.tokens
    assert "<|im_end|>" in encoding.tokens
    assert encoding.tokens.count("Ġ") == 3  # no white space beside them is lost
    assert tokenizer.decode(encoding.ids) == "a <tool>  [PAD0]"
    assert tokenizer.token_to_id("[PAD0]") is None


@pytest.mark.parametrize(("pre", "is_one"), [("llama-bpe", True), ("smollm", False)])
def test_a_piece_that_is_a_token_needs_merges_in_some_families_only(tmp_path: Path, pre: str, is_one: bool) -> None:
    path = write_gguf(tmp_path / "m.gguf", pre, extra=[("zqzq", NORMAL)], add_bos_token=False)
    assert (source_tokenizer(path).tokenizer.encode("zqzq").tokens == ["zqzq"]) == is_one


@pytest.mark.parametrize(
    ("pre", "says", "first"),
    [("smollm", {}, False), ("smollm", {"add_bos_token": True}, True), ("llama-bpe", {}, True),
     ("llama-bpe", {"add_bos_token": False}, False)],
)  # fmt: skip
def test_the_first_token_is_as_the_file_says_or_as_its_family_does(
    tmp_path: Path, pre: str, says: dict[str, bool], first: bool
) -> None:
    tokenizer = source_tokenizer(write_gguf(tmp_path / "m.gguf", pre, **says)).tokenizer
    assert (tokenizer.encode("the").ids[0] == 1) == first
    assert 1 not in tokenizer.encode("the", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({"eos": 0}, (0,)),
        ({"eos": 0, "template": CHATML}, (0, 2)),
        ({"eos": 2, "eot_token_id": 1}, (0, 1, 2)),
        ({"eos": 0, "template": "{{ raise_exception('no') }}"}, (0,)),
        ({"eos": 0, "template": "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"}, (0,)),
    ],
)
def test_ends_are_those_declared_the_turn_and_the_document(
    tmp_path: Path, changes: dict[str, Any], ends: tuple[int, ...]
) -> None:
    assert source_tokenizer(write_gguf(tmp_path / "m.gguf", "smollm", **changes)).end_tokens == ends


@pytest.mark.parametrize(
    ("pre", "changes", "named"),
    [
        ("deepseek-llm", {}, r"pre is 'deepseek-llm'.*known: gpt-2, .*smollm"),
        (None, {}, "pre is None"),
        ("smollm", {"model": "llama"}, "model is 'llama'"),
        ("smollm", {"merges": ["x"]}, "merges does not fit"),
        ("smollm", {"merges": ["☃ ☃"]}, "merges does not fit"),
        ("smollm", {"kinds": [1, 1]}, "2 entries in tokenizer.ggml.token_type"),
        ("smollm", {"extra": [(TOKENS[0], NORMAL)]}, "the same text"),
        ("smollm", {"eos": 99_999}, "eos_token_id is 99999"),
        ("smollm", {"add_space_prefix": True}, "add_space_prefix"),
    ],
)
def test_what_cannot_be_built_exactly_is_refused(
    tmp_path: Path, pre: str | None, changes: dict[str, Any], named: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", pre, **changes)
    with pytest.raises(ExportError, match=rf"m\.gguf: .*{named}.*Hugging Face folder"):
        source_tokenizer(path)


def test_metadata_is_what_the_reference_reader_finds(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        "smollm",
        float=0.5,
        negative=-3,
        flag=True,
        ints=[1, -2],
        floats=[0.5],
        text="é\r\n",
    )
    fields = gguf.GGUFReader(path).fields
    expected = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert read_metadata(path) == expected


@pytest.mark.parametrize("kept", [0, 3, 12, 30, 200, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "smollm").read_bytes()
    metadata = whole[: whole.rindex(b"tokenizer.ggml.bos_token_id") + 35]
    (tmp_path / "cut.gguf").write_bytes(metadata[:kept])
    with pytest.raises(ExportError, match=r"cut\.gguf is empty, truncated or damaged"):
        source_tokenizer(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 some archive", "is no GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(64), "is GGUF version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(64), "big-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + b"\xff" * 64, "damaged"),
    ],
)
def test_another_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(ExportError, match=rf"other\.gguf .*{message}"):
        source_tokenizer(tmp_path / "other.gguf")


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"nowhere\.gguf cannot be read \(No such file"):
        source_tokenizer(tmp_path / "nowhere.gguf")
