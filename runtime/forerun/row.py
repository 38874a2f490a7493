"""One sequence while it is decoded: every piece of its state, and the one place where that state advances."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.controls import Controls
from forerun.detokenizer import Detokenizer
from forerun.edits import NO_EDITS, EditRules, PlaceEdits, SequenceEdits
from forerun.errors import RequestError
from forerun.laws import LAWS
from forerun.randomness import Stream, noise_keys, uniforms
from forerun.stats import Stats
from forerun.stopping import StopMatcher
from forerun.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of an emitted token's probability, and of the most likely tokens', the likeliest first.

    Under the target's law after all controls; at temperature 0, where that is one-hot, under the law at temperature 1.
    `top` leaves out tokens that cannot come, so it may hold fewer than were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round decided for one row: n of its proposals are kept, and `next_token` follows them.

    `next_token` is -1 where the target's logits behind the kept ones have no law. `draft` made the proposals.
    """

    proposals: Sequence[int]
    accepted: int
    next_token: int
    logprobs: Sequence[TokenLogprob] = ()
    draft: str | None = None

    @property
    def tokens(self) -> list[int]:
        """What the row is to emit."""
        kept = list(self.proposals[: self.accepted])
        return kept if self.next_token < 0 else [*kept, self.next_token]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a round emitted for one sequence.

    `text` is what may be shown now: characters that are not whole yet, and what may become a stop text, come with a
    later chunk. `pieces` is the text of each token before stop texts are looked for. `rejected` are the proposals that
    were not kept, the first of them replaced by the correction. `draft` made the proposals; None where there were none.
    """

    text: str
    token_ids: tuple[int, ...]
    accepted: int
    rejected: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    draft: str | None = None


class Row:
    """A sequence: committed tokens (prompt and output), and what follows from them token by token.

    `drafts` may propose for it. K is `draft_length`, or at most that and chosen anew for each round if `adaptive`.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        controls: Controls,
        tokenizer: Tokenizer,
        *,
        context: int,
        drafts: Sequence[str],
        draft_length: int,
        adaptive: bool,
        rules: EditRules,
        seed: int,
        number: int = 0,
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.controls = controls
        self.drafts = drafts
        self.draft_length = draft_length
        self.adaptive = adaptive
        self.seed = seed
        self.number = number
        self.law = LAWS[controls.law_name]
        self.noise_keys = noise_keys(seed)
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self._cancelled = False
        self.text = ""
        self.chunks: deque[Chunk] = deque()
        self.stats = Stats(law=controls.law_name, draft="+".join(drafts) or "none")
        self.logprobs: list[TokenLogprob] = []
        self.length_limit = min(context, len(prompt) + controls.max_new_tokens)
        self.edits = None if rules.empty else SequenceEdits(rules, prompt, length_limit=self.length_limit)
        self._end_tokens = rules.end_tokens
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopMatcher(controls.stop)

    @property
    def active(self) -> bool:
        """Whether tokens are still to come."""
        return self.finish_reason is None and self.error is None and not self._cancelled

    def cancel(self) -> None:
        """No one waits for this sequence any more."""
        self._cancelled = True

    def finished(self) -> bool:
        """Whether the sequence has ended. Raises the error that ended it, or RequestError if it was cancelled."""
        if self.error is not None:
            raise self.error
        if self._cancelled and self.finish_reason is None:
            raise RequestError("the sequence was cancelled because the decoder was closed; open it again")
        return self.finish_reason is not None

    def proposals_wanted(self) -> int:
        """The largest K of the next round: no more than could be emitted, with a place for the correction or bonus."""
        return min(self.draft_length, self.length_limit - len(self.tokens) - 1)

    def edits_at(self, drafted: Sequence[int]) -> PlaceEdits:
        """How the logits behind the committed tokens and these drafted ones are edited."""
        return NO_EDITS if self.edits is None else self.edits.at(drafted)

    def uniforms(self, stream: Stream, position: int, index: int, count: int) -> list[float]:
        """This sequence's random numbers; zeros at temperature 0, where none is looked at."""
        if self.controls.temperature == 0:
            return [0.0] * count
        return uniforms(self.seed, stream, position, index, count)

    def commit(self, verdict: Verdict) -> Chunk:
        """Emit the kept proposals and the token after them, up to the sequence's end if that comes first."""
        emitted: list[int] = []
        pieces: list[str] = []
        shown = ""
        for token in verdict.tokens:
            emitted.append(token)
            pieces.append(self._detokenizer.push(token))
            shown += self._stop.push(pieces[-1])
            self.tokens.append(token)
            if self.edits is not None:
                self.edits.commit(token)
            if (reason := self._end_reason(token)) is not None:
                shown += self._finish(reason)
                break
        self.text += shown
        self.stats.count_round(
            draft=verdict.draft, proposed=len(verdict.proposals), accepted=verdict.accepted, emitted=len(emitted)
        )
        chunk = Chunk(
            shown,
            tuple(emitted),
            accepted=min(verdict.accepted, len(emitted)),
            rejected=tuple(verdict.proposals[verdict.accepted :]),
            pieces=tuple(pieces),
            draft=verdict.draft,
            logprobs=tuple(verdict.logprobs[: len(emitted)]),
        )
        self.logprobs += chunk.logprobs
        self.chunks.append(chunk)
        return chunk

    def _end_reason(self, token: int) -> FinishReason | None:
        if token in self._end_tokens or self._stop.matched is not None:
            return "stop"
        return "length" if len(self.tokens) >= self.length_limit else None

    def _finish(self, reason: FinishReason) -> str:
        """The text still held back. A stop text may end in what a half character was held for."""
        rest = self._stop.push(self._detokenizer.flush()) + self._stop.flush()
        self.finish_reason = "stop" if self._stop.matched is not None else reason
        return rest
