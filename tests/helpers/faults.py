"""Models with faults: contexts after which no token can be drawn from the logits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from helpers.table_models import TableModel

VOCABULARY = 8
NAN, INF = math.nan, math.inf

Fault = Mapping[int, float]
"""Logits by token; the others stay as they are."""

FAULTS: dict[str, Fault] = {
    "NaN in one logit": {5: NAN},
    "NaN in the first logit": {0: NAN},
    "NaN in all logits": dict.fromkeys(range(VOCABULARY), NAN),
    "+inf in one logit": {2: INF},
    "+inf in two logits": {2: INF, 6: INF},
    "-inf in all logits": dict.fromkeys(range(VOCABULARY), -INF),
}


def wild_model(seed: int) -> TableModel:
    """A table so high, and weights so wild, that hardly two contexts share a place in it."""
    rng = np.random.default_rng(seed)
    return TableModel(
        rng.normal(scale=1.5, size=(99991, VOCABULARY)).astype(np.float32),
        rng.permutation(97)[:VOCABULARY].astype(np.float32),
        rng.permutation(997)[:64].astype(np.float32),
    )


def with_faults(model: TableModel, faults: Sequence[tuple[Sequence[int], Fault]]) -> TableModel:
    """The model with each of these faults after its context."""
    table = model.table.copy()
    for context, fault in faults:
        weights = model.token_weights[list(context)] * model.position_weights[: len(context)]
        table[int(weights.sum()) % len(table), list(fault)] = list(fault.values())
    return replace(model, table=table)


def faulty_throughout(model: TableModel, *, faults: Sequence[Fault]) -> TableModel:
    """The model with these faults in the places of its table, in turn; an empty one is none."""
    table = model.table.copy()
    for start, fault in enumerate(faults):
        for token, logit in fault.items():
            table[start :: len(faults), token] = logit
    return replace(model, table=table)
