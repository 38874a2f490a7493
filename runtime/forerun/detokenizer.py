"""Tokens to text as they come: whole characters only, nothing twice, nothing lost."""

import codecs
from collections.abc import Iterator
from typing import Any

from forerun.tokenizer import Tokenizer


class Detokenizer:
    """Incremental `Tokenizer.decode(tokens)` of one sequence, special tokens skipped.

    The pieces, the one of `flush` included, join to exactly that text, at a cost per token that does not grow
    with the text. Text is held while a later token could still change it:

    * byte-level vocabularies: the first bytes of an unfinished character (three at most);
    * byte fallback: a run of byte tokens, since one bad byte turns every byte of its run into U+FFFD;
    * a decoder that looks further back than one token (none of the common ones): everything, until `flush`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Not tokenizers.decoders.DecodeStream: it has no flush, and it raises when a bad byte follows characters
        # of the same byte run that it has already shown.
        byte_level = _is_byte_level(tokenizer.decoder)
        self._pieces: _ByteLevelText | _WindowedText = _ByteLevelText() if byte_level else _WindowedText(tokenizer)
        self._tokenizer = tokenizer

    def push(self, token: int) -> str:
        """The text that this token settles; often a word, "" while a character is unfinished."""
        text = self._tokenizer.visible_text(token)
        return "" if text is None else self._pieces.push(token, text)

    def flush(self) -> str:
        """What was still held, as `decode` shows it; call once, after the last token."""
        return self._pieces.flush()


class _ByteLevelText:
    """Each token is bytes; the text is their UTF-8, each ill-formed part of it one U+FFFD."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int, text: str) -> str:
        return self._utf8.decode(_token_bytes(text))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowedText:
    """The text that held tokens add is what decoding them behind the last settled token adds to it.

    Decoders treat the first token apart (a leading space is dropped there, and only there): with a settled
    token in front, the held ones are never first.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._can_settle = _is_windowed(tokenizer.decoder)
        self._byte_fallback = any(part["type"] == "ByteFallback" for part in _parts(tokenizer.decoder))
        self._settled: list[int] = []  # the last settled token, or none yet
        self._held: list[int] = []

    def push(self, token: int, text: str) -> str:
        self._held.append(token)
        if not self._can_settle or (self._byte_fallback and _is_byte(text)):
            return ""
        piece = self.flush()
        self._settled = [token]
        return piece

    def flush(self) -> str:
        start = len(self._tokenizer.decode(self._settled))
        piece = self._tokenizer.decode(self._settled + self._held)[start:]
        self._held = []
        return piece


def _byte_of_character() -> Iterator[tuple[str, int]]:
    # The alphabet of byte-level vocabularies (GPT-2): printable Latin-1 stands for itself, the other 68 bytes
    # for the characters from U+0100 on.
    stand_in = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD):
            yield chr(byte), byte
        else:
            yield chr(stand_in), byte
            stand_in += 1


_BYTES = dict(_byte_of_character())


def _token_bytes(text: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in text])
    except KeyError:
        return text.encode()  # an added token, spelled as itself


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in _parts(inner)]


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    return [part["type"] for part in _parts(decoder)] == ["ByteLevel"]


def _is_windowed(decoder: dict[str, Any] | None) -> bool:
    """Whether one settled token is context enough: no step looks further back."""
    fused = False
    for part in _parts(decoder):
        match part["type"]:
            case "Fuse":
                fused = True
            case "WordPiece" | "BPEDecoder" | "Metaspace" | "ByteFallback" if not fused:
                pass
            case "Replace" if not fused or len(part["pattern"].get("String", "")) == 1:
                pass
            case "Strip" if not fused or (part["start"] <= 1 and part["stop"] == 0):
                pass
            case _:
                return False
    return True
