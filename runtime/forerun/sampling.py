"""The sampling engines, stage by stage, on the device:

    logits -> edit -> law -> draw                  a token of plain decoding
                          -> propose               a token of the draft, with its law kept as q
                          -> verify                how many proposals are accepted, and the token after them
                          -> logprobs

At temperature 0 in all rows no law is made: draws and verification take logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun.edits import Edit, PlaceEdits
from forerun.engine import Backend, Call, Engine, Tensor
from forerun.errors import EngineError
from forerun.laws import LAWS, Demands
from forerun.workspace import LogitTensors, RoundTensors


@dataclass(frozen=True)
class Shaped:
    """One model's logits after their edits; `side.p` is their law, where rows sample."""

    side: LogitTensors
    edited: bool

    @property
    def logits(self) -> Tensor:
        """The logits [B,R,V] that everything behind the edits takes."""
        return self.side.edited if self.edited else self.side.logits


STAGES = (
    "edit",
    "law",
    "law-filtered",
    "draw",
    "draw-greedy",
    "propose",
    "propose-greedy",
    *dict.fromkeys(law.verification(points=points) for law in LAWS.values() for points in (False, True)),
    "logprobs",
)


WITH_Q = ("verify-residual", "verify-block")
"""Verifications that look at q; where none of them runs, it takes no memory."""


class Sampler:
    """The stages of an engine directory, each bound to a round's tensors on first use.

    Raises EngineError where a stage is missing: rows with any controls may meet in one batch.
    """

    def __init__(self, engines: Mapping[str, Engine], backend: Backend) -> None:
        if missing := [name for name in STAGES if name not in engines]:
            raise EngineError(f"sampling graphs are missing: {', '.join(missing)}; export the pair again")
        self._engines = engines
        self._backend = backend
        self._bound: dict[tuple[str, object], Call] = {}

    def unbound(self) -> Sampler:
        """The same stages with bindings of their own, for tensors that are used for a while only."""
        return Sampler(self._engines, self._backend)

    def shape(
        self, side: LogitTensors, tensors: RoundTensors, demands: Demands, places: Sequence[PlaceEdits] | None
    ) -> Shaped:
        """From a model's logits to what tokens are drawn from.

        `places` are the edits of all B*R places in row-major order; None where no row of the batch has any.
        """
        if places is not None:
            self._edit(side, places)
        shaped = Shaped(side, edited=places is not None)
        if demands.samples:
            graph = "law-filtered" if demands.filters else "law"
            self._run(graph, shaped, lambda: {**tensors.filters, "logits": shaped.logits, "p": side.p})
        return shaped

    def _edit(self, side: LogitTensors, places: Sequence[PlaceEdits]) -> None:
        edits = side.edits(max(len(place.tokens) for place in places))
        width = edits["edit_tokens"].shape[2]
        listed = [entry for place in places for entry in _padded(place, width)]
        write = self._backend.write
        write(edits["edit_tokens"], [token for token, _ in listed])
        write(edits["edit_bias"], [edit.bias for _, edit in listed])
        write(edits["edit_penalty"], [edit.penalty for _, edit in listed])
        write(edits["edit_shift"], [edit.shift for _, edit in listed])
        write(edits["only"], [place.only for place in places])
        self._run("edit", (side, width), lambda: {**edits, "logits": side.logits, "edited": side.edited})

    def draw(self, shaped: Shaped, tensors: RoundTensors, demands: Demands) -> None:
        """Plain decoding's token of each row, into `next_token`; -1 where a row has no law."""
        token = tensors.next_token.view(tensors.rows, 1)
        if demands.samples:
            uniforms = {"uniforms": tensors.draw_uniforms, **tensors.randomness}
            places = {"positions": shaped.side.positions, "p": shaped.side.p}
            self._run("draw", shaped, lambda: {**uniforms, **places, "token": token})
        else:
            self._run("draw-greedy", shaped, lambda: {"logits": shaped.logits, "token": token})

    def propose(self, shaped: Shaped, tensors: RoundTensors, demands: Demands) -> None:
        """Proposal number `step` of each row: into `draft_token`, `tokens` and, where rows sample, `q`."""
        kept = {
            "step": tensors.step,
            "tokens_in": tensors.tokens,
            "tokens_out": tensors.tokens,
            "token": tensors.draft_token,
        }
        owner = (shaped, tensors)
        if demands.samples:
            uniforms = {"uniforms": tensors.propose_uniforms, **tensors.randomness}
            places = {"positions": shaped.side.positions, "p": shaped.side.p}
            self._run(
                "propose",
                owner,
                lambda: {**kept, **uniforms, **places, "q_in": tensors.q, "q_out": tensors.q},
            )
        else:
            self._run("propose-greedy", owner, lambda: {**kept, "logits": shaped.logits})

    def verify(self, graph: str, shaped: Shaped, tensors: RoundTensors, demands: Demands) -> None:
        """The verdict on each row's proposals, into `accepted` and `next_token`; -1 where that has no law."""
        decided = {
            "tokens": tensors.tokens,
            "valid": tensors.valid,
            "accepted": tensors.accepted,
            "next_token": tensors.next_token,
        }
        given = {"logits": shaped.logits, "positions": shaped.side.positions, **tensors.randomness}
        if demands.samples:
            given["p"] = shaped.side.p
        if graph in WITH_Q:
            given["q"] = tensors.q
        self._run(graph, shaped, lambda: {**decided, **given})

    def logprobs(self, shaped: Shaped, tensors: RoundTensors, demands: Demands) -> None:
        """Log-probabilities of `logprobs["tokens"]` of a model's side, and of the most likely tokens."""
        side, samples = shaped.side, demands.samples
        # At temperature 0 the graph does not look at p: where there is none, the logits stand in.
        given = {"logits": shaped.logits, "p": side.p if samples else shaped.logits}
        names = {**given, **side.logprobs, "temperature": tensors.temperature}
        self._run("logprobs", (shaped, samples), lambda: names)

    def _run(self, graph: str, owner: object, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Run a graph on the tensors of its input and output names; `owner` stands for them once they are bound."""
        if (call := self._bound.get((graph, owner))) is None:
            engine, names = self._engines[graph], tensors()
            call = self._bound[graph, owner] = engine.bind(
                {spec.name: names[spec.name] for spec in engine.inputs},
                {spec.name: names[spec.name] for spec in engine.outputs},
            )
        call()

    def forget(self) -> None:
        """Drop every binding, because the tensors have moved."""
        self._bound.clear()


def _padded(place: PlaceEdits, width: int) -> list[tuple[int, Edit]]:
    """The place's edits, filled up by repeating one of them: to write the same number twice changes nothing."""
    listed = list(place.tokens.items()) or [(0, Edit())]
    return listed + listed[:1] * (width - len(listed))
