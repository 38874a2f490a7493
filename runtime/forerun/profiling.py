"""The calls of a round, made for their timing: what `forerun.costs` measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from forerun.costs import MEASURED_TOKENS, Calls
from forerun.engine import Backend
from forerun.laws import LAWS, Demands, Law
from forerun.model import CachedModel, Shape
from forerun.sampling import Sampler
from forerun.workspace import RoundTensors, Workspace

Call = Callable[[], None]


class Timed(Protocol):
    """A draft whose steps take time."""

    def timed_calls(self, tensors: Mapping[int, RoundTensors]) -> Mapping[int, Call]:
        """See `SteppingDraft.timed_calls`."""


def calls_of_a_round(
    backend: Backend, target: CachedModel, draft: Timed | None, sampler: Sampler, *, draft_length: int
) -> Calls:
    """Calls by curve and number of tokens, for draft lengths up to `draft_length`. They have caches of their own."""
    sampler = sampler.unbound()
    tokens = [number for number in MEASURED_TOKENS if number <= draft_length + 1] or [1]
    if tokens[-1] <= draft_length:
        tokens.append(draft_length + 1)
    workspace = Workspace(backend, rows=1, draft_length=max(tokens[-1] - 1, 1), vocabulary_size=target.vocabulary_size)
    tensors = {number: workspace.tensors(1, number - 1) for number in tokens}
    for each in tensors.values():
        _fill(backend, each)
    calls: dict[str, Mapping[int, Call]] = {"target": model_calls(target, tensors)}
    if draft is not None:
        calls["draft"] = draft.timed_calls(tensors)
    for name, law in (("greedy", LAWS["greedy"]), ("sampled", LAWS["block"])):
        demands = Demands(laws=(law,), filters=False, edits=False, logprobs=False)
        calls[f"accept_{name}"] = {
            number: _accept_call(sampler, each, demands, law) for number, each in tensors.items()
        }
        calls[f"draw_{name}"] = {1: _propose_call(sampler, workspace.tensors(1, 1), demands)}
    return calls


def _fill(backend: Backend, tensors: RoundTensors) -> None:
    """What the graphs look at, where zeros would mean something else than in a round."""
    backend.write(tensors.temperature, [1.0])
    backend.write(tensors.valid, [tensors.draft_length])


def model_calls(model: CachedModel, tensors: Mapping[int, RoundTensors]) -> Mapping[int, Call]:
    """Calls of a decoder with caches of its own, by their number of tokens, each of which has logits."""
    own = model.with_own_cache()
    own.cache.reserve(1, max(tensors) + 1)

    def call(each: RoundTensors) -> Call:
        tokens = each.draft_length + 1
        shape = Shape(0, 1, tokens, logit_rows=tokens)
        bound = own.bind(shape, input_ids=each.tokens, logits=each.target.logits)
        return lambda: own.run(bound, [0])

    return {number: call(each) for number, each in tensors.items()}


def _accept_call(sampler: Sampler, tensors: RoundTensors, demands: Demands, law: Law) -> Call:
    def call() -> None:
        shaped = sampler.shape(tensors.target, tensors, demands, None)
        if tensors.draft_length:
            sampler.verify(law.verify, shaped, tensors, demands)
        else:
            sampler.draw(shaped, tensors, demands)

    return call


def _propose_call(sampler: Sampler, tensors: RoundTensors, demands: Demands) -> Call:
    return lambda: sampler.propose(sampler.shape(tensors.draft, tensors, demands, None), tensors, demands)
