"""The controls of a request in plain Python: edits of logits, and the filters of a law."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from forerun.oracle.laws import Law, law_of


class Edit(NamedTuple):
    """What happens to the logit of a token."""

    bias: float = 0.0
    penalty: float = 1.0  # of repetition
    shift: float = 0.0  # presence + frequency * count; infinity bans


def edited(logits: Sequence[float], edits: Mapping[int, Edit], *, only: bool = False) -> list[float]:
    """Logits after the edits, given by token; with `only`, every other token is ruled out."""
    changed = [-math.inf if only else logit for logit in logits]
    for token, edit in edits.items():
        logit = logits[token] + edit.bias
        changed[token] = (logit / edit.penalty if logit > 0 else logit * edit.penalty) - edit.shift
    return changed


def filtered_law(
    logits: Sequence[float], temperature: float, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Law:
    """The law after top-k, top-p and min-p, in this order; at temperature 0 they change nothing.

    Of equal logits at the edge of the nucleus the higher tokens are kept, as Hugging Face transformers does it with
    a stable sort.
    """
    law = law_of(logits, temperature)
    if temperature == 0:
        return law
    if top_k:
        kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        law = _keep(law, [logit >= kth for logit in logits])
    if top_p < 1:
        law = _keep(law, _nucleus(logits, law, top_p))
    least = min_p * max(law)
    return _keep(law, [weight >= least for weight in law])


def _nucleus(logits: Sequence[float], law: Law, top_p: float) -> list[bool]:
    kept, before = [False] * len(law), 0.0
    for token in sorted(range(len(law)), key=lambda token: (logits[token], token), reverse=True):
        kept[token] = before < top_p or before == 0.0
        before += law[token]
    return kept


def _keep(law: Law, kept: Sequence[bool]) -> Law:
    weights = [weight if keep else 0.0 for weight, keep in zip(law, kept, strict=True)]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
