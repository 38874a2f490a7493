"""What a decoder must say, computed token by token in plain Python, without caches, batches or graphs."""

from collections.abc import Sequence

from forerun.oracle import argmax, inverse_cdf, law_of, residual_step
from forerun.randomness import Stream, uniforms
from helpers.table_models import TableModel


def greedy(target: TableModel, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The `count` tokens that plain decoding at temperature 0 emits."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(argmax(target.logits(tokens)))
    return tuple(tokens[len(prompt) :])


def sampled(
    target: TableModel,
    draft: TableModel,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float,
    seed: int,
    draft_length: int,
) -> tuple[int, ...]:
    """The `count` tokens of law `residual` with this seed; they depend on K, and on nothing else."""
    tokens, limit = list(prompt), len(prompt) + count
    while len(tokens) < limit:
        start = len(tokens)
        proposals: list[int] = []
        q_rows = []
        for step in range(min(draft_length, limit - start - 1)):
            q_rows.append(law_of(draft.logits(tokens + proposals), temperature))
            proposals.append(inverse_cdf(q_rows[-1], _pair(seed, Stream.DRAFT, start + step, step)))
        accepted, following = residual_step(
            [law_of(target.logits(tokens + proposals[:n]), temperature) for n in range(len(proposals) + 1)],
            q_rows,
            proposals,
            accept_uniforms=[
                uniforms(seed, Stream.ACCEPT, start + n, n, 1)[0] for n in range(len(proposals))
            ],
            draw=lambda law, start=start: inverse_cdf(law, _pair(seed, Stream.DRAW, start, 0)),
        )
        tokens += [*proposals[:accepted], following]
    return tuple(tokens[len(prompt) :])


def _pair(seed: int, stream: Stream, position: int, index: int) -> tuple[float, float]:
    first, second = uniforms(seed, stream, position, index, 2)
    return first, second
