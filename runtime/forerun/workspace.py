"""The device tensors of a round, allocated once for the largest batch in use and viewed for each shape.

B, K, V    rows of the batch, draft length (0: plain decoding), tokens of the vocabulary
R          rows of logits for each row of the batch: K + 1 of the target, 1 of the draft
E          edited tokens at a place
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from forerun.engine import Backend, ElementType, Tensor

FLOAT, INT64, BOOL = ElementType.FLOAT, ElementType.INT64, ElementType.BOOL
TOP_LOGPROBS = 20
"""Most likely tokens that the logprobs graph gives for a place."""


class Memory:
    """Named tensors that are allocated on first use, at their largest, and viewed at any shape that fits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tensors: dict[str, Tensor] = {}

    def view(self, name: str, element_type: ElementType, shape: tuple[int, ...], largest: tuple[int, ...]) -> Tensor:
        """The first elements of the tensor `name`, as `shape`."""
        if name not in self._tensors:
            self._tensors[name] = self._backend.allocate(element_type, largest)
        return self._tensors[name].view(*shape)


class LogitTensors:
    """Logits of one model, [B,R,V], and what they become on their way to a law."""

    def __init__(
        self, name: str, memory: Memory, *, rows: int, width: int, size: int, largest: tuple[int, int]
    ) -> None:
        self._name = name
        self._memory = memory
        self.shape = (rows, width, size)
        self._largest = (*largest, size)
        self.positions = memory.view(f"{name}.positions", INT64, (rows, width), largest)

    def _wide(self, name: str) -> Tensor:
        return self._memory.view(f"{self._name}.{name}", FLOAT, self.shape, self._largest)

    @cached_property
    def logits(self) -> Tensor:
        """The model's own."""
        return self._wide("logits")

    @cached_property
    def edited(self) -> Tensor:
        """Logits after the edits of `forerun.edits`."""
        return self._wide("edited")

    @cached_property
    def p(self) -> Tensor:
        """Next-token laws, after every control."""
        return self._wide("p")

    def edits(self, width: int) -> Mapping[str, Tensor]:
        """Inputs of the graph `edit` for at least `width` tokens a place; one set of tensors for each power of two."""
        width = max(16, 1 << (width - 1).bit_length())
        rows, places, _ = self.shape
        types = {"edit_tokens": INT64, "edit_bias": FLOAT, "edit_penalty": FLOAT, "edit_shift": FLOAT}
        tensors = {
            name: self._memory.view(
                f"{self._name}.{name}.{width}", kind, (rows, places, width), (*self._largest[:2], width)
            )
            for name, kind in types.items()
        }
        only = self._memory.view(f"{self._name}.only", BOOL, (rows, places), self._largest[:2])
        return {**tensors, "only": only}

    @cached_property
    def logprobs(self) -> Mapping[str, Tensor]:
        """What the graph `logprobs` takes and gives: given tokens [B,R], and the 20 most likely ones [B,R,20]."""
        rows, places, size = self.shape
        count = min(TOP_LOGPROBS, size)
        few, all_few = (rows, places, count), (*self._largest[:2], count)
        view, name = self._memory.view, self._name
        return {
            "tokens": view(f"{name}.emitted", INT64, (rows, places), self._largest[:2]),
            "logprob": view(f"{name}.logprob", FLOAT, (rows, places), self._largest[:2]),
            "top_logprobs": view(f"{name}.top_logprobs", FLOAT, few, all_few),
            "top_tokens": view(f"{name}.top_tokens", INT64, few, all_few),
        }


class RoundTensors:
    """Everything that a round of B rows and draft length K reads and writes on the device."""

    def __init__(self, memory: Memory, *, rows: int, draft_length: int, size: int, largest: tuple[int, int]) -> None:
        most_rows, most_proposals = largest

        def small(name: str, element_type: ElementType, *columns: int) -> Tensor:
            widest = (max(most_proposals + 1, 2),) if columns else ()
            return memory.view(name, element_type, (rows, *columns), (most_rows, *widest))

        self.rows, self.draft_length = rows, draft_length
        # Of each row.
        self.valid = small("valid", INT64)  # proposals that count; the others are padding
        self.temperature = small("temperature", FLOAT)
        self.top_k = small("top_k", INT64)
        self.top_p = small("top_p", FLOAT)
        self.min_p = small("min_p", FLOAT)
        self.coupled = small("coupled", BOOL)  # rows whose draws are keyed races
        self.noise_keys = small("noise_keys", INT64, 2)
        self.accept_uniforms = small("accept_uniforms", FLOAT, draft_length)
        self.draw_uniforms = small("draw_uniforms", FLOAT, 2)
        self.propose_uniforms = small("propose_uniforms", FLOAT, 2)
        self.step = small("step", INT64)  # number of the proposal, the same for all rows
        # Tokens.
        self.last_two = small("last_two", INT64, 2)  # committed tokens that the draft's first step takes
        self.draft_token = small("draft_token", INT64, 1)  # a proposal: the draft's next input_ids
        self.tokens = small("tokens", INT64, draft_length + 1)  # pending, then proposals: the target's input_ids
        self.accepted = small("accepted", INT64)
        self.next_token = small("next_token", INT64)
        # Logits and laws.
        self.target = LogitTensors(
            "target",
            memory,
            rows=rows,
            width=draft_length + 1,
            size=size,
            largest=(most_rows, most_proposals + 1),
        )
        self.draft = LogitTensors("draft", memory, rows=rows, width=1, size=size, largest=(most_rows, 1))
        self._q = (memory, (rows, draft_length, size), (most_rows, most_proposals, size))

    @cached_property
    def q(self) -> Tensor:
        """float32 [B,K,V]: the laws that the proposals were drawn from."""
        memory, shape, largest = self._q
        return memory.view("q", FLOAT, shape, largest)

    @property
    def filters(self) -> Mapping[str, Tensor]:
        """What turns logits into a law, by the graphs' names."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }

    @property
    def randomness(self) -> Mapping[str, Tensor]:
        """What decides a draw or an acceptance, by the graphs' names."""
        return {
            "coupled": self.coupled,
            "noise_keys": self.noise_keys,
            "accept_uniforms": self.accept_uniforms,
            "draw_uniforms": self.draw_uniforms,
        }


class Workspace:
    """Memory for rounds of up to `rows` rows and draft length `draft_length`."""

    def __init__(self, backend: Backend, *, rows: int, draft_length: int, vocabulary_size: int) -> None:
        self.rows = rows
        self._memory = Memory(backend)
        self._largest = (rows, max(1, draft_length))
        self._vocabulary_size = vocabulary_size
        self._views: dict[tuple[int, int], RoundTensors] = {}

    def tensors(self, rows: int, draft_length: int) -> RoundTensors:
        """Views for `rows` rows and K = `draft_length`; always the same ones for the same numbers."""
        key = (rows, draft_length)
        if key not in self._views:
            self._views[key] = RoundTensors(
                self._memory,
                rows=rows,
                draft_length=draft_length,
                size=self._vocabulary_size,
                largest=self._largest,
            )
        return self._views[key]
