"""Which tokens a head proposes: those that answers hold most often."""

from collections import Counter
from collections.abc import Iterable, Sequence


def candidates(texts: Iterable[Sequence[int]], *, count: int, vocabulary_size: int, always: Iterable[int]) -> list[int]:
    """The `count` most frequent tokens of the texts, and those of `always`, ascending.

    Where the texts have fewer, low ids fill up: vocabularies are built from frequent pieces to rare ones.
    """
    counts = Counter(token for text in texts for token in text)
    first = [token for token in dict.fromkeys(always) if 0 <= token < vocabulary_size]
    by_frequency = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = dict.fromkeys((*first, *by_frequency, *range(vocabulary_size)))
    return sorted(list(chosen)[: min(count, vocabulary_size)])


def coverage(texts: Iterable[Sequence[int]], tokens: Iterable[int]) -> float:
    """The share of the texts' tokens that are among these."""
    among = set(tokens)
    found = [token in among for text in texts for token in text]
    return sum(found) / max(len(found), 1)
