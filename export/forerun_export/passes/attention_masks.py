"""What a traced attention layer does to its scores before the softmax, found out by running that part alone.

The scores pass through a chain of operators: a scale, perhaps a cap (Gemma 2), a mask and perhaps a bias by distance
(ALiBi). Scale and cap are read from the chain's constants. Mask and bias are what the chain makes of zero scores, in
calls of many sizes up to the whole context. In the end the chain must do in each call what was read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from forerun_export.passes.evaluation import Array, Piece, constant_array
from forerun_export.passes.sides import Run
from forerun_export.passes.static_attention import Visibility

# Some exports hide with a large number in place of the most negative one.
_HIDING = -1e30, -1e4
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class ScoreRule:
    """scores -> cap * tanh(scale * scores / cap) (without a cap: scale * scores), then mask and bias."""

    scale: float
    softcap: float
    visibility: Visibility


class RefusedError(Exception):
    """Why a layer cannot be expressed; the caller names the layer."""


def read_rule(
    model: ir.Model, *, raw: ir.Value, final: ir.Value, heads: int, ranks: int, context: int, key_factor: float
) -> ScoreRule:
    """The rule between the product `raw` and the softmax's input `final`, both [B,heads,S,T] (or [B*heads,S,T]).

    `key_factor` is what the keys were multiplied with before. Raises RefusedError if the chain follows no such rule.
    """
    scale, softcap = _constants(model, raw, final)
    chain = _Chain(model, raw, final, heads, ranks)
    visibility = _visibility(chain, context)
    window = visibility.window or context
    for run in _runs(context, window):
        _prove(chain, run, scale, softcap, visibility)
    return ScoreRule(scale * key_factor, softcap, visibility)


def _runs(context: int, window: int) -> Iterator[Run]:
    """Calls of all kinds: prefill, one token, several; at the window's edge and at the end of the context."""
    sizes = {(0, 1), (0, 5), (3, 1), (3, 4), (context - 1, 1), (context - 4, 4)}
    sizes |= {(max(window - 3, 0), 6), (0, min(window + 3, 64)), (window, 1)}
    for past, new in sorted(sizes):
        if past >= 0 and past + new <= context:
            yield Run(batch=2 if past + new < 128 else 1, new=new, past=past)


class _Chain:
    """The operators between the product and the softmax, runnable by themselves."""

    def __init__(self, model: ir.Model, raw: ir.Value, final: ir.Value, heads: int, ranks: int) -> None:
        self._raw, self._heads, self._ranks = raw, heads, ranks
        self._piece = Piece(model, [final], [raw])
        if tokens := [str(v.name) for v in self._piece.inputs if v is not raw and not v.is_graph_input()]:
            raise RefusedError(f"its scores also depend on {tokens[0]}")

    def run(self, run: Run, scores: Array) -> Array:
        """What scores [B,heads,S,T] become."""
        if self._ranks == 3:
            scores = scores.reshape(-1, *scores.shape[2:])
        found = self._piece.run({**run.feeds(self._piece.inputs), self._raw: scores})[0]
        shape = (run.batch, self._heads, run.new, run.past + run.new)
        if found.size != np.prod(shape):
            raise RefusedError(f"its scores change their shape to {list(found.shape)} before the softmax")
        return found.reshape(shape)

    def zeros(self, run: Run) -> Array:
        """Mask and bias: what scores of zero become."""
        return self.run(run, np.zeros((run.batch, self._heads, run.new, run.past + run.new), np.float32))


def _constants(model: ir.Model, raw: ir.Value, final: ir.Value) -> tuple[float, float]:
    """Scale and cap, from the constants that scores are multiplied with before and behind a Tanh."""
    before, behind, capped = 1.0, 1.0, False
    for node, value in reversed(list(chain_of(final, raw))):
        if node.op_type == "Tanh":
            capped = True
        elif node.op_type in ("Mul", "Div"):
            factor = _factor(model, node, value)
            before, behind = (before, behind * factor) if capped else (before * factor, behind)
    return before * behind, behind if capped else 0.0


def chain_of(final: ir.Value, raw: ir.Value) -> Iterator[tuple[ir.Node, ir.Value]]:
    """The nodes on the way from `final` back to `raw`, each with the value on the way that it reads."""
    value = final
    while value is not raw:
        node = value.producer()
        ahead = [source for source in node.inputs if source is not None and leads_to(source, raw)] if node else []
        if node is None or len(set(ahead)) != 1:
            kind = "nothing" if node is None else f"node {node.name} ({node.op_type})"
            raise RefusedError(f"its scores pass through {kind}, which mixes them in an unknown way")
        yield node, ahead[0]
        value = ahead[0]


def leads_to(value: ir.Value, end: ir.Value, *, steps: int = 64) -> bool:
    """Whether `value` is computed from `end` within some steps."""
    waiting, seen = [(value, steps)], {value}
    while waiting:
        value, left = waiting.pop()
        if value is end:
            return True
        node = value.producer()
        if node is not None and left and node.op_type not in ("MatMul", "Shape"):
            fresh = [source for source in node.inputs if source is not None and source not in seen]
            seen.update(fresh)
            waiting += [(source, left - 1) for source in fresh]
    return False


def _factor(model: ir.Model, node: ir.Node, value: ir.Value) -> float:
    others = [source for source in node.inputs if source is not value]
    array = constant_array(model, others[0]) if others and others[0] is not None else None
    if array is None or array.size != 1 or (node.op_type == "Div" and node.inputs[0] is not value):
        raise RefusedError(f"its scores are scaled by no constant (node {node.name}, {node.op_type})")
    return 1 / float(array.item()) if node.op_type == "Div" else float(array.item())


def _visibility(chain: _Chain, context: int) -> Visibility:
    """Window and slopes, from the last token of the context and all before it."""
    bias = chain.zeros(Run(batch=1, new=1, past=context - 1))[0, :, 0]  # [heads,context]
    seen = ~_hidden(bias)
    count = int(seen[0].sum())
    if count == 0 or not (seen == seen[0]).all() or not seen[0, context - count :].all():
        raise RefusedError(f"its last token sees {count} of {context} tokens, and not the last ones in every head")
    slopes = (bias[:, -1] - bias[:, context - count]).astype(np.float64) / max(count - 1, 1)
    return Visibility(None if count == context else count, tuple(slopes.tolist()) if slopes.any() else ())


def _hidden(bias: Array) -> Array:
    hidden: Array = (bias < _HIDING[0]) | (bias == _HIDING[1]) | np.isnan(bias)
    return hidden


def _prove(chain: _Chain, run: Run, scale: float, softcap: float, visibility: Visibility) -> None:
    """Raises RefusedError unless the chain does in this call what was read."""
    zeros = chain.zeros(run)
    scores = np.random.default_rng(run.past).standard_normal(zeros.shape).astype(np.float32)
    found = chain.run(run, scores)
    keys = np.arange(run.past + run.new)
    distance = np.arange(run.past, run.past + run.new)[:, None] - keys
    seen = (distance >= 0) & (distance < (visibility.window or np.inf))
    where = f"in a call of {run.new} tokens behind {run.past}"
    if not (_hidden(found) == ~seen).all():
        raise RefusedError(f"its mask is neither causal nor a sliding window ({where})")
    slopes = np.array(visibility.slopes or [0.0]).reshape(-1, 1, 1)
    expected = softcap * np.tanh(scale * scores / softcap) if softcap else scale * scores
    expected = expected - slopes * distance
    own = np.take_along_axis(zeros, np.broadcast_to(_own(run), (*zeros.shape[:-1], 1)), axis=-1)
    error = np.abs(np.where(seen, found - own - expected, 0)).max()  # a bias may differ by a constant in each row
    if error > _TOLERANCE * max(1.0, float(np.abs(np.where(seen, found, 0)).max())):
        raise RefusedError(f"its scores are off by {error:.1g} from scale {scale:.6g} and cap {softcap:.6g} ({where})")


def _own(run: Run) -> Array:
    """The slot [S,1] of each new token."""
    return np.arange(run.past, run.past + run.new)[:, None]
