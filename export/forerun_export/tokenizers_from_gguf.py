"""The tokenizer of a GGUF file, split as the model was trained to split; and of any source, by its path.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) but does not hold it. With another one, some texts
get slightly wrong tokens, which nothing later would notice: so only names whose pre-tokenizer is known exactly
are built, and any other is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from forerun.errors import ExportError
from forerun_export.gguf_metadata import read_metadata
from forerun_export.source_tokenizers import SourceTokenizer, assemble
from forerun_export.tokenizers_from_folder import from_folder

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_FROM_FOLDER = "export from the model's Hugging Face folder instead"


@dataclass(frozen=True)
class _Splitting:
    pre_tokenizer: pre.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    """A piece that is a token as a whole becomes that token, whatever the merges make of it."""
    adds_bos: bool = False
    """If the file does not say."""


def _by_words(numbers: str) -> pre.PreTokenizer:
    """Words with one leading mark, numbers as given, marks with line ends, white space."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        numbers,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    return pre.Sequence(
        [
            pre.Split(Regex("|".join(words)), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3 = _Splitting(_by_words(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
_SPLITTINGS = {
    "gpt-2": _Splitting(pre.ByteLevel(add_prefix_space=False)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Splitting(_by_words(r"\p{N}"), normalizer=normalizers.NFC()),
    "smollm": _Splitting(pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])),
}


def source_tokenizer(path: Path) -> SourceTokenizer:
    """The tokenizer of a GGUF file or of a Hugging Face folder.

    Raises ExportError, naming the file, if it is missing, damaged, or of a kind that cannot be built exactly.
    """
    return from_folder(path) if path.is_dir() else from_gguf(path)


def from_gguf(path: Path) -> SourceTokenizer:
    """Build the tokenizer that `tokenizer.ggml.*` describes; raises ExportError as `source_tokenizer`."""
    metadata = read_metadata(path)
    try:
        return _build(metadata)
    except _UnfitError as unfit:
        raise ExportError(f"{path}: {unfit}; {_FROM_FOLDER}") from unfit.__cause__


class _UnfitError(Exception):
    """What is wrong with a tokenizer; the caller knows the file."""


def _build(metadata: Mapping[str, Any]) -> SourceTokenizer:
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    splitting = _splitting(fields)
    tokens, kinds = _tokens(fields)
    tokenizer = Tokenizer(_byte_pairs(tokens, kinds, fields["merges"], splitting))
    if splitting.normalizer is not None:
        tokenizer.normalizer = splitting.normalizer
    tokenizer.pre_tokenizer = splitting.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, kinds)
    bos, eos = (_named(fields, tokens, key) for key in ("bos_token_id", "eos_token_id"))
    # add_eos_token is left out on purpose: what follows a prompt is the answer.
    if fields.get("add_bos_token", splitting.adds_bos):
        _begin_with(tokenizer, fields.get("bos_token_id"), bos)
    return assemble(
        tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        declared_ends=[fields[key] for key in _END_KEYS if _named(fields, tokens, key) is not None],
        bos_token=bos,
        eos_token=eos,
    )


def _splitting(fields: Mapping[str, Any]) -> _Splitting:
    model = fields.get("model")
    if model != "gpt2":
        # SentencePiece ("llama"): the file does not say where the model's own tokenizer adds spaces.
        raise _UnfitError(f"tokenizer.ggml.model is {model!r}; only 'gpt2' can be built exactly")
    name = fields.get("pre")
    if name not in _SPLITTINGS:
        raise _UnfitError(
            f"tokenizer.ggml.pre is {name!r}, a split that is not known (known: {', '.join(_SPLITTINGS)})"
        )
    if fields.get("add_space_prefix"):
        raise _UnfitError("tokenizer.ggml.add_space_prefix is set, which no known byte-level tokenizer does")
    return _SPLITTINGS[name]


def _tokens(fields: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    for key in ("tokens", "token_type", "merges"):
        if not isinstance(fields.get(key), list):
            raise _UnfitError(f"tokenizer.ggml.{key} is missing")
    tokens, kinds = fields["tokens"], fields["token_type"]
    if len(tokens) != len(kinds):
        raise _UnfitError(f"{len(kinds)} entries in tokenizer.ggml.token_type for {len(tokens)} tokens")
    return tokens, kinds


def _byte_pairs(tokens: list[str], kinds: list[int], merges: list[str], splitting: _Splitting) -> models.BPE:
    # Unused ids pad the embedding and have made-up texts: the model's own tokenizer does not know them.
    used = [(text, token) for token, text in enumerate(tokens) if kinds[token] != _UNUSED]
    vocabulary = dict(used)
    if len(vocabulary) != len(used):
        raise _UnfitError("two tokens have the same text")
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        return models.BPE(vocabulary, pairs, ignore_merges=splitting.ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        raise _UnfitError(f"tokenizer.ggml.merges does not fit the tokens ({error})") from error


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    # They are found in the text as it came (normalized=False), and take no space beside them (no strip).
    special, whole = (
        [AddedToken(tokens[token], normalized=False, special=is_special) for token in chosen]
        for is_special, chosen in (
            (True, [token for token, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN)]),
            (False, [token for token, kind in enumerate(kinds) if kind == _USER_DEFINED]),
        )
    )
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)


def _begin_with(tokenizer: Tokenizer, token: int | None, text: str | None) -> None:
    if text is None:
        raise _UnfitError("the prompt begins with a token that tokenizer.ggml.bos_token_id does not name")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["BOS", "$A"], special_tokens=[{"id": "BOS", "ids": [token], "tokens": [text]}]
    )


def _named(fields: Mapping[str, Any], tokens: list[str], key: str) -> str | None:
    token: int | None = fields.get(key)
    if token is None:
        return None
    if not 0 <= token < len(tokens):
        raise _UnfitError(f"tokenizer.ggml.{key} is {token}, beyond the {len(tokens)} tokens")
    return tokens[token]
