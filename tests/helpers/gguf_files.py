"""GGUF files with a small byte-level tokenizer, and what an independent reader makes of its tokens."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import regex
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from helpers.small_tokenizers import BYTE_CHARACTERS

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "it's the 12th: 12:12:53, we'll see; DON'T 1234567 things 2025-01-01",
    "    indented\n\n    code = x  +  y\n\t\treturn 'the'\r\n\r\nthe end   ",
    "你好\uff0c世界 你好 résumé naïve 😀👍🏽 ½ ٣٤ hello-world!!! ...\n",
] * 20

# The published regular expressions of each family, apart from the code under test.
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def gpt2_pieces(text: str) -> list[str]:
    return regex.findall(GPT2, text)


def trained() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level vocabulary; merges cross what only some families split."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "merged_with_next"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=BYTE_CHARACTERS, max_token_length=5, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


TOKENS, MERGES = trained()


def write_gguf(path: Path, pre: str | None, **changes: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(changes.pop("model", "gpt2"))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    extra = changes.pop("extra", [])
    tokens = changes.pop("tokens", [*SPECIALS, *TOKENS, *(text for text, _ in extra)])
    writer.add_token_list(tokens)
    kinds = [CONTROL] * len(SPECIALS) + [NORMAL] * len(TOKENS) + [kind for _, kind in extra]
    writer.add_token_types(changes.pop("kinds", kinds))
    writer.add_token_merges(changes.pop("merges", MERGES))
    writer.add_eos_token_id(changes.pop("eos", 2))
    writer.add_bos_token_id(changes.pop("bos", 1))
    if template := changes.pop("template", None):
        writer.add_chat_template(template)
    for key, value in changes.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_tokens(pieces: list[str], *, ignore_merges: bool) -> list[int]:
    """Byte pair encoding as the paper tells it: the earliest merge first, everywhere, until none applies."""
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    token_of = {text: token for token, text in enumerate([*SPECIALS, *TOKENS])}
    tokens = []
    for piece in pieces:
        symbols = [BYTE_CHARACTERS[byte] for byte in piece.encode()]
        if ignore_merges and "".join(symbols) in token_of:
            symbols = ["".join(symbols)]
        while pairs := [pair for pair in pairwise(symbols) if pair in ranks]:
            first = min(pairs, key=ranks.__getitem__)
            merged: list[str] = []
            for symbol in symbols:
                if merged and (merged[-1], symbol) == first:
                    merged[-1] += symbol
                else:
                    merged.append(symbol)
            symbols = merged
        tokens += [token_of[symbol] for symbol in symbols]
    return tokens
