import json
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ExportError
from forerun_export.source_tokenizers import SourceTokenizer
from forerun_export.tokenizers_from_gguf import source_tokenizer
from helpers.gguf_files import (
    CHATML,
    CORPUS,
    MERGES,
    SPECIALS,
    TOKENS,
    gpt2_pieces,
    reference_tokens,
    write_gguf,
)


def write_folder(folder: Path, gguf_path: Path, **files: Any) -> SourceTokenizer:
    """A folder with the tokenizer of the GGUF file; `files`: JSON contents by file name without its ending."""
    source_tokenizer(gguf_path).tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return source_tokenizer(folder)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", "smollm", template=CHATML)


def test_a_folder_and_its_gguf_give_the_same_tokenizer(tmp_path: Path, small_gguf: Path) -> None:
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    folder = write_folder(tmp_path, small_gguf, tokenizer_config=config)
    file = source_tokenizer(small_gguf)
    assert folder.tokenizer.to_str() == file.tokenizer.to_str()
    for name in ("chat_template", "end_tokens", "bos_token", "eos_token"):
        assert getattr(folder, name) == getattr(file, name)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config": {"eos_token_id": [5, 6]}, "config": {"eos_token_id": 7}}, (0, 5, 6)),
        ({"generation_config": {"eos_token_id": 5}}, (0, 5)),
        ({"generation_config": {}, "config": {"eos_token_id": 7}}, (0, 7)),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, (0, 2)),
        ({}, (0,)),
    ],
)
def test_declared_ends_come_from_the_first_file_that_has_them(
    tmp_path: Path, small_gguf: Path, files: dict[str, Any], ends: tuple[int, ...]
) -> None:
    assert write_folder(tmp_path, small_gguf, **files).end_tokens == ends


def test_a_template_file_comes_before_one_in_the_configuration(tmp_path: Path, small_gguf: Path) -> None:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    assert write_folder(tmp_path, small_gguf, tokenizer_config={"chat_template": named}).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_bytes(b"file\r\n")
    source = source_tokenizer(tmp_path)
    assert source.chat_template == "file\r\n"
    (tmp_path / "out").mkdir()
    source.save(tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_bytes() == b"file\r\n"


def test_a_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    vocabulary = {text: token for token, text in enumerate([*TOKENS, "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}', encoding="utf-8")
    expected = [token - len(SPECIALS) for token in reference_tokens(gpt2_pieces(CORPUS[0]), ignore_merges=False)]
    assert source_tokenizer(tmp_path).tokenizer.encode(CORPUS[0]).ids == expected


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]"])
def test_a_damaged_file_of_a_folder_is_named(tmp_path: Path, small_gguf: Path, name: str, content: bytes) -> None:
    write_folder(tmp_path, small_gguf)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ExportError, match=rf"{name} .*download it again"):
        source_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"holds no tokenizer.*tokenizer\.json") as caught:
        source_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
