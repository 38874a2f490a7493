"""The device tensors of a round, allocated once for the largest batch in use and viewed for each shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forerun.engine import Backend, ElementType, Tensor


@dataclass(frozen=True, eq=False)
class RoundTensors:
    """Tensors of a round of B rows and draft length K (K = 0: plain decoding), V tokens in the vocabulary."""

    tokens: Tensor  # int64 [B,K+1]: the pending token, then the proposals; the target's input_ids
    valid: Tensor  # int64 [B]: proposals that count; the others are padding
    temperature: Tensor  # float32 [B]
    logits: Tensor  # float32 [B,K+1,V]: the target's
    draw_uniforms: Tensor  # float32 [B,2]
    accept_uniforms: Tensor  # float32 [B,K]
    accepted: Tensor  # int64 [B]
    next_token: Tensor  # int64 [B]
    last_two: Tensor  # int64 [B,2]: committed tokens that the draft's first step takes
    draft_token: Tensor  # int64 [B,1]: a proposal; the draft's next input_ids
    draft_logits: Tensor  # float32 [B,1,V]
    step: Tensor  # int64 [B]: number of the proposal, the same for all rows
    propose_uniforms: Tensor  # float32 [B,2]
    q: Tensor  # float32 [B,K,V]: the laws that the proposals were drawn from
    for_draw: Mapping[str, Tensor] = field(init=False)
    for_propose: Mapping[str, Tensor] = field(init=False)
    for_verify: Mapping[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """The names that the sampling graphs give to these tensors; in-place outputs stand beside their inputs."""
        rows = self.valid.shape[0]
        names = {
            "for_draw": {
                "logits": self.logits,
                "temperature": self.temperature,
                "uniforms": self.draw_uniforms,
                "token": self.next_token.view(rows, 1),
            },
            "for_propose": {
                "logits": self.draft_logits,
                "temperature": self.temperature,
                "uniforms": self.propose_uniforms,
                "step": self.step,
                "q_in": self.q,
                "q_out": self.q,
                "tokens_in": self.tokens,
                "tokens_out": self.tokens,
                "token": self.draft_token,
            },
            "for_verify": {
                "logits": self.logits,
                "q": self.q,
                "tokens": self.tokens,
                "valid": self.valid,
                "temperature": self.temperature,
                "accept_uniforms": self.accept_uniforms,
                "draw_uniforms": self.draw_uniforms,
                "accepted": self.accepted,
                "next_token": self.next_token,
            },
        }
        for name, tensors in names.items():
            object.__setattr__(self, name, tensors)


class Workspace:
    """Memory for rounds of up to `rows` rows and draft length `draft_length`."""

    def __init__(self, backend: Backend, *, rows: int, draft_length: int, vocabulary_size: int) -> None:
        self.rows = rows
        self._vocabulary_size = vocabulary_size
        self._memory = {
            name: backend.allocate(element_type, shape)
            for name, (element_type, shape) in self._shapes(rows, draft_length).items()
        }
        self._views: dict[tuple[int, int], RoundTensors] = {}

    def _shapes(self, rows: int, draft_length: int) -> dict[str, tuple[ElementType, tuple[int, ...]]]:
        size, float32, int64 = self._vocabulary_size, ElementType.FLOAT, ElementType.INT64
        return {
            "tokens": (int64, (rows, draft_length + 1)),
            "valid": (int64, (rows,)),
            "temperature": (float32, (rows,)),
            "logits": (float32, (rows, draft_length + 1, size)),
            "draw_uniforms": (float32, (rows, 2)),
            "accept_uniforms": (float32, (rows, draft_length)),
            "accepted": (int64, (rows,)),
            "next_token": (int64, (rows,)),
            "last_two": (int64, (rows, 2)),
            "draft_token": (int64, (rows, 1)),
            "draft_logits": (float32, (rows, 1, size)),
            "step": (int64, (rows,)),
            "propose_uniforms": (float32, (rows, 2)),
            "q": (float32, (rows, draft_length, size)),
        }

    def tensors(self, rows: int, draft_length: int) -> RoundTensors:
        """Views for `rows` rows and K = `draft_length`; always the same ones for the same numbers."""
        key = (rows, draft_length)
        if key not in self._views:
            shapes = self._shapes(rows, draft_length)
            self._views[key] = RoundTensors(
                **{name: memory.view(*shapes[name][1]) for name, memory in self._memory.items()}
            )
        return self._views[key]
