"""What holds on a live decoder between two steps, checked; every violation is told, in words.

A diagnostic: it runs the models once more for every sequence and reads their caches to the host, which decoding
never does. No other thread may decode meanwhile.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.cache import KeyValueCache
from forerun.draft import ModelDraft, SteppingDraft
from forerun.engine import Backend, ElementType, Tensor
from forerun.stats import Stats

if TYPE_CHECKING:
    from forerun.decoder import Decoder


@dataclass(frozen=True)
class RowSnapshot:
    """A sequence in the batch, as it was when the check began."""

    index: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    length_limit: int
    drafts: Sequence[str]
    adaptive: bool
    text: str
    decoded: str  # the text of all emitted tokens
    stats: Stats


@dataclass(frozen=True)
class CachedPrefix:
    """A cache, how many of a row's slots hold what follows from its committed tokens, and the same made anew."""

    name: str
    cache: KeyValueCache
    cached: Callable[[RowSnapshot], int]
    reread: Callable[[RowSnapshot, int], KeyValueCache]


def violations(decoder: Decoder) -> list[str]:
    """Everything that does not hold; none on a sound decoder.

    Rows: no more than the engines take, no sequence in two of them, none past its limit.
    Counts: those of `Stats` agree with each other and with the tokens.
    Text: what was shown begins the text of the emitted tokens.
    Caches: large enough, and below a row's cached length bit for bit what a prefill of its committed tokens gives.

    Sequences that have ended, and wait to be released, are left out.
    """
    rows = snapshot(decoder)
    found = list(_batch_violations(decoder, rows))
    for row in rows:
        found += [f"row {row.index}: {fault}" for fault in (*_count_faults(row), *_length_faults(row))]
    for prefix in _cached_prefixes(decoder):
        for row in rows if prefix.name == "target" else [row for row in rows if SteppingDraft.name in row.drafts]:
            faults = _cache_faults(prefix, row, decoder.backend)
            found += [f"row {row.index}: {prefix.name} cache: {fault}" for fault in faults]
    return found


def snapshot(decoder: Decoder) -> list[RowSnapshot]:
    """The sequences that are being decoded, in the order of their rows."""
    return [
        RowSnapshot(
            index=index,
            tokens=tuple(row.tokens),
            prompt_tokens=row.prompt_tokens,
            length_limit=row.length_limit,
            drafts=row.drafts,
            adaptive=row.adaptive,
            text=row.text,
            decoded=decoder.tokenizer.decode(row.tokens[row.prompt_tokens :]),
            stats=dataclasses.replace(row.stats, accepted_by_position=list(row.stats.accepted_by_position)),
        )
        for index, row in enumerate(decoder.scheduler.rows)
        if row.active
    ]


def _batch_violations(decoder: Decoder, rows: Sequence[RowSnapshot]) -> Iterator[str]:
    live, limit = decoder.scheduler.rows, decoder.manifest.limits.batch
    if len(live) > limit:
        yield f"{len(live)} rows, the engines take {limit}"
    if len({id(row) for row in live}) < len(live):
        yield "a sequence is in two rows"


def _length_faults(row: RowSnapshot) -> Iterator[str]:
    if len(row.tokens) >= row.length_limit:
        yield f"{len(row.tokens)} tokens, and not ended at its limit of {row.length_limit}"
    if not row.decoded.startswith(row.text):
        yield f"shows {row.text!r}, which does not begin the text of its tokens, {row.decoded!r}"


def _count_faults(row: RowSnapshot) -> Iterator[str]:
    stats, by_position = row.stats, row.stats.accepted_by_position
    emitted = len(row.tokens) - row.prompt_tokens
    if stats.emitted != emitted:
        yield f"{emitted} tokens emitted, {stats.emitted} counted"
    if stats.emitted != stats.accepted + stats.corrections + stats.bonuses - stats.truncated:
        yield "emitted is not accepted + corrections + bonuses - truncated"
    if stats.truncated:
        yield f"{stats.truncated} tokens truncated, though the sequence goes on"
    if stats.rounds != stats.corrections + stats.bonuses:
        yield f"{stats.rounds} rounds gave {stats.corrections} corrections and {stats.bonuses} bonuses"
    if stats.accepted > stats.proposed:
        yield f"{stats.accepted} accepted of {stats.proposed} proposed"
    if sum(by_position) != stats.accepted:
        yield f"{stats.accepted} accepted, {sum(by_position)} by position"
    if any(later > earlier for earlier, later in itertools.pairwise(by_position)):
        yield f"acceptance increases with the position: {by_position}"


def _cached_prefixes(decoder: Decoder) -> Iterator[CachedPrefix]:
    target = decoder.target
    yield CachedPrefix(
        "target",
        target.cache,
        lambda row: len(row.tokens) - 1,  # one is pending
        lambda row, slots: target.reread(row.tokens[:slots]),
    )
    if (draft := decoder.draft) is not None:
        yield CachedPrefix(
            "draft",
            draft.model.cache,
            lambda row: _drafts_cached(draft, row),
            lambda row, slots: draft.reread(row.index, row.tokens, slots),
        )


def _drafts_cached(draft: SteppingDraft[Any], row: RowSnapshot) -> int:
    """Rows whose draft model is asked every round lack the last two at the most, which the next round feeds."""
    if isinstance(draft, ModelDraft) and not row.adaptive:
        return max(len(row.tokens) - 2, 0)
    return draft.cached(row.index)


def _cache_faults(prefix: CachedPrefix, row: RowSnapshot, backend: Backend) -> Iterator[str]:
    held, cache = prefix.cached(row), prefix.cache
    if held == 0:
        return
    if row.index >= cache.rows or held > cache.capacity:
        yield f"{cache.rows} rows of {cache.capacity} slots, too few for {held} tokens in row {row.index}"
        return
    pairs = zip(cache.tensors(row.index, 1), prefix.reread(row, held).tensors(0, 1), strict=True)
    wrong: set[int] = set()
    for (_, _, found), (_, _, expected) in pairs:
        slots = zip(_slots(backend, found), _slots(backend, expected), strict=False)
        wrong.update(slot for slot, (one, other) in enumerate(slots) if slot < held and one != other)
    if wrong:
        yield f"slots {', '.join(map(str, sorted(wrong)))} do not hold the committed tokens"


def _slots(backend: Backend, cache: Tensor) -> list[bytes]:
    """What each slot of a row's cache [1,H,C,D] holds, the heads one after another."""
    _, heads, capacity, head_size = cache.shape
    # As int64, so that NaNs and signed zeros are compared like any other bits; C is even, so that nothing is left over.
    words = Tensor(cache.address, ElementType.INT64, (cache.bytes // ElementType.INT64.bytes,), cache.owner)
    content, width = array("q", backend.read(words)).tobytes(), head_size * cache.element_type.bytes
    starts = [[(head * capacity + slot) * width for head in range(heads)] for slot in range(capacity)]
    return [b"".join(content[start : start + width] for start in places) for places in starts]
