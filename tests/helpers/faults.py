"""Models with a fault at one context: logits that no token can be drawn from."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from helpers.table_models import TableModel

NAN, INF = math.nan, math.inf

FAULTS: dict[str, dict[int, float]] = {
    "NaN in one logit": {5: NAN},
    "NaN in the first logit": {0: NAN},
    "NaN in all logits": dict.fromkeys(range(8), NAN),
    "+inf in one logit": {2: INF},
    "+inf in two logits": {2: INF, 6: INF},
    "-inf in all logits": dict.fromkeys(range(8), -INF),
}
"""Logits by token, of 8; the others stay as they are."""


def faulty(model: TableModel, context: Sequence[int], fault: dict[int, float]) -> TableModel:
    """The model with these logits after this context, and after those that share its place in the table."""
    table = model.table.copy()
    weights = model.token_weights[list(context)] * model.position_weights[: len(context)]
    table[int(weights.sum()) % len(table), list(fault)] = list(fault.values())
    return replace(model, table=table)


def faulty_throughout(model: TableModel, *, every: int, fault: dict[int, float]) -> TableModel:
    """The model with these logits in one of `every` places of its table."""
    table = model.table.copy()
    table[np.ix_(range(0, len(table), every), list(fault))] = list(fault.values())
    return replace(model, table=table)
