"""Tokenizers of every kind of decoder, small enough to read."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARACTERS = [chr(byte if byte in _PRINTABLE else 0x100 + _OTHERS.index(byte)) for byte in range(256)]
"""How byte-level vocabularies spell each byte."""

FIRST_BYTE_TOKEN = {"byte level": 0, "byte fallback": 2}
"""Token of byte 0 by kind of tokenizer; those of the other bytes follow."""


def byte_level() -> Tokenizer:
    """All bytes, tokens that cut characters and that span several, a special and two user-defined tokens."""
    spelled = [text for text, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("你好 the� 😀")]
    vocabulary = [*BYTE_CHARACTERS, *dict.fromkeys(spelled), "ä½", "ðŁĺ", "Ģa"]
    tokenizer = Tokenizer(models.BPE({text: token for token, text in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False, special=True)])
    tokenizer.add_tokens(["two words", "é"])
    return tokenizer


def byte_fallback(*, leading_space: bool = True) -> Tokenizer:
    """As SentencePiece models: spaces are U+2581, unknown characters are bytes."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "▁a",
        "a",
        "b",
        "▁你",
        "�",
    ]
    tokenizer = Tokenizer(
        models.BPE({text: token for token, text in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if leading_space else parts)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """Leading U+2581 dropped at the very start."""
    return _of_words(["▁a", "▁", "b", "▁b▁", "<s>"], decoders.Metaspace())


def word_piece() -> Tokenizer:
    """Continuations begin with ##; punctuation loses the space before it."""
    return _of_words(["play", "##ing", "##s", ".", "'", "n't", "do", "<s>"], decoders.WordPiece())


def word_suffix() -> Tokenizer:
    """Words end with </w>, which is a space unless it is the last."""
    return _of_words(["play", "ing</w>", "s</w>", "</w>", "<s>"], decoders.BPEDecoder())


def whitespace_words() -> Tokenizer:
    """No decoder at all: words are joined with spaces."""
    return _of_words(["one", "two", "three", "<s>"], None)


def looking_back() -> Tokenizer:
    """A decoder that rewrites text across tokens."""
    rewriting = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "X")])
    return _of_words(["a", "b", "c", "<s>"], rewriting)


def lookup_words(words: list[str]) -> Tokenizer:
    """One token for each word between spaces, in the order of `words`; the first stands for all others."""
    tokenizer = _of_words(words, None, special=None)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


ALL_KINDS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, spaces kept": lambda: byte_fallback(leading_space=False),
    "metaspace": metaspace,
    "word piece": word_piece,
    "word suffix": word_suffix,
    "whitespace words": whitespace_words,
    "looking back": looking_back,
}


def _of_words(words: list[str], decoder: decoders.Decoder | None, *, special: str | None = "<s>") -> Tokenizer:
    vocabulary = {text: token for token, text in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    if special is not None:
        tokenizer.add_special_tokens([special])
    return tokenizer
