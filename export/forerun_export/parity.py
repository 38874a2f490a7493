"""Parity: a built graph against its source, a checkpoint run eagerly in PyTorch or a graph that was exported before.

The yardstick of a checkpoint is float64. Both the graph and PyTorch in float32 differ from it by rounding only, each
in its own order of summation, so the graph's error is of the size of PyTorch's own. The bound, prompt by prompt, is
ROUNDING_MULTIPLE times that. Measured: good graphs reach a fifth of it; a graph with swapped heads, another scale,
positions off by one or a forgotten row of a norm is 800 times or more above it, one whose down projection is 0.1%
too large in one layer of SmolLM2's thirty 14 times.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.errors import ExportError
from forerun.manifest import Parity
from forerun_export.graph_runner import Floats, GraphRunner
from forerun_export.progress import Report, silent
from forerun_export.reference import Doubles, Prompt, Reference, source_references
from forerun_export.sources import Source

ROUNDING_MULTIPLE = 8
SHARED = 12
"""Tokens that the first two fixed prompts share: a tree can be checked against two chains."""
RAGGED = 3
"""Tokens of each prompt that the ragged batch decodes behind the prefill."""

_FLOAT32_EPSILON = 2.0**-23


@dataclass(frozen=True)
class Rows:
    """Logits [rows,V] of the graph and of the reference for some tokens of prompt number `prompt`."""

    prompt: int
    logits: Floats
    expected: Doubles

    def error(self) -> float:
        """The largest difference; infinite if the graph gave something that is no number."""
        error = float(np.abs(self.logits - self.expected).max())
        return error if np.isfinite(error) else float("inf")


def fixed_prompts(vocabulary_size: int, *, context: int, texts: Sequence[Sequence[int]] = ()) -> tuple[Prompt, ...]:
    """Prompts made by rule, one of them at the end of the context, then the token ids of some real texts.

    Texts are cut to the context; those of fewer than four tokens are left out.
    """
    first = _by_rule(vocabulary_size, 24, 1)
    return (
        Prompt(first),
        Prompt(first[:SHARED] + _by_rule(vocabulary_size, 5, 2)),
        Prompt(_by_rule(vocabulary_size, 9, 3)),
        Prompt(_by_rule(vocabulary_size, 16, 4), first_position=max(0, context - 16)),
        *(Prompt(tuple(text[:context])) for text in texts if len(text) > RAGGED),
    )


def _by_rule(vocabulary_size: int, length: int, seed: int) -> tuple[int, ...]:
    return tuple((seed * 7919 + i * i * 104729 + i * 31) % vocabulary_size for i in range(length))


def references(
    source: Source,
    vocabulary_size: int,
    *,
    context: int,
    texts: Sequence[Sequence[int]] = (),
    variants: Sequence[tuple[int, ...]] = ((),),
    report: Report = silent,
) -> Mapping[tuple[int, ...], Reference]:
    """The reference of each variant (a tuple of layers left out), from one load of the source."""
    prompts = fixed_prompts(vocabulary_size, context=context, texts=texts)
    return source_references(source, prompts, variants=variants, report=report)


def check(graph_path: Path, reference: Reference, *, weights_folder: Path | None = None) -> Parity:
    """Run every prompt through the graph in every way that decoding does, and compare all logits.

    Ways: one call; a prefill and then single tokens; chunks; a ragged batch; a tree. The result holds the error and
    the bound of the prompt that comes closest to its bound. Raises ExportError if one is over it, or is no number.
    """
    runner = GraphRunner(graph_path, weights_folder=weights_folder)
    bounds = _bounds(reference)
    found = [(way, rows.prompt, rows.error()) for way, run in WAYS.items() for rows in run(runner, reference)]
    way, prompt, error = max(found, key=lambda item: item[2] / bounds[item[1]])
    if error > bounds[prompt]:
        raise ExportError(
            f"{graph_path} does not compute what its checkpoint does: logits differ by {error:.2g} ({way}), "
            f"float32 rounding explains {bounds[prompt]:.2g}; try another front end, and report it"
        )
    return Parity(reference.name, error, bounds[prompt], len({item[:2] for item in found}))


def _bounds(reference: Reference) -> list[float]:
    """The bound of each prompt: a float32 result is off by its own last place at least."""
    sizes = [float(np.abs(logits).max()) for logits in reference.logits]
    return [bound(rounding, size) for rounding, size in zip(reference.rounding, sizes, strict=True)]


def bound(rounding: float, size: float) -> float:
    """What rounding explains of logits as large as `size`, where PyTorch in float32 is off by `rounding`."""
    return ROUNDING_MULTIPLE * max(rounding, size * _FLOAT32_EPSILON)


def compare(
    graph_path: Path,
    source: Source,
    *,
    context: int,
    weights_folder: Path | None = None,
    layers_left_out: tuple[int, ...] = (),
    texts: Sequence[Sequence[int]] = (),
) -> Parity:
    """`references` and `check` in one, for a single graph."""
    vocabulary_size = GraphRunner(graph_path, weights_folder=weights_folder).vocabulary_size
    found = references(source, vocabulary_size, context=context, texts=texts, variants=[layers_left_out])
    return check(graph_path, found[layers_left_out], weights_folder=weights_folder)


def _positions(prompt: Prompt, start: int, length: int) -> list[list[int]]:
    return [[prompt.first_position + start + step for step in range(length)]]


def _in_pieces(runner: GraphRunner, reference: Reference, pieces: Callable[[int], Iterator[int]]) -> Iterator[Rows]:
    """Each prompt alone, in calls of the lengths that `pieces(prompt length)` gives."""
    for number, (prompt, expected) in enumerate(zip(reference.prompts, reference.logits, strict=True)):
        caches = runner.new_caches(1, capacity=_capacity(len(prompt.tokens)))
        done = 0
        for length in pieces(len(prompt.tokens)):
            tokens = [prompt.tokens[done : done + length]]
            positions = _positions(prompt, done, length)
            logits = runner.run(caches, tokens, [done], positions=positions)[0]
            yield Rows(number, logits, expected[done : done + length])
            done += length


def _capacity(tokens: int) -> int:
    return -(-tokens // 64) * 64


def _one_call(runner: GraphRunner, reference: Reference) -> Iterator[Rows]:
    return _in_pieces(runner, reference, lambda length: iter([length]))


def _single_tokens(runner: GraphRunner, reference: Reference) -> Iterator[Rows]:
    def pieces(length: int) -> Iterator[int]:
        yield from (length // 2, *[1] * (length - length // 2))

    return _in_pieces(runner, reference, pieces)


def _chunks(runner: GraphRunner, reference: Reference) -> Iterator[Rows]:
    def pieces(length: int) -> Iterator[int]:
        yield from (min(7, length - start) for start in range(0, length, 7))

    return _in_pieces(runner, reference, pieces)


def _ragged_batch(runner: GraphRunner, reference: Reference) -> Iterator[Rows]:
    """All prompts but their last tokens in one padded call, then those, each row at its own place."""
    prompts = reference.prompts
    prefixes = [len(prompt.tokens) - RAGGED for prompt in prompts]
    longest = max(prefixes)
    caches = runner.new_caches(len(prompts), capacity=_capacity(longest + RAGGED))
    padded = [[*prompt.tokens[:n], *[0] * (longest - n)] for prompt, n in zip(prompts, prefixes, strict=True)]
    positions = [_positions(prompt, 0, n)[0] for prompt, n in zip(prompts, prefixes, strict=True)]
    positions = [[*row, *[row[-1]] * (longest - len(row))] for row in positions]
    logits = runner.run(caches, padded, [0] * len(prompts), positions=positions, logit_rows=[[n - 1] for n in prefixes])
    yield from (Rows(row, logits[row], reference.logits[row][n - 1 : n]) for row, n in enumerate(prefixes))
    last = [prompt.tokens[-RAGGED:] for prompt in prompts]
    positions = [_positions(prompt, n, RAGGED)[0] for prompt, n in zip(prompts, prefixes, strict=True)]
    logits = runner.run(caches, last, prefixes, positions=positions)
    yield from (Rows(row, logits[row], reference.logits[row][-RAGGED:]) for row in range(len(prompts)))


def _tree(runner: GraphRunner, reference: Reference) -> Iterator[Rows]:
    """The two prompts that share a beginning, as two branches of one call."""
    (first, second), depth = reference.prompts[:2], 3
    caches = runner.new_caches(1, capacity=64)
    runner.run(caches, [first.tokens[:SHARED]], [0], logit_rows=[[0]])
    branches = [prompt.tokens[SHARED : SHARED + depth] for prompt in (first, second)]
    chain = np.tril(np.ones((depth, depth), bool))
    logits = runner.run(
        caches,
        [branches[0] + branches[1]],
        [SHARED],
        positions=[list(range(SHARED, SHARED + depth)) * 2],
        tree_mask=[np.kron(np.eye(2, dtype=bool), chain)],
    )[0]
    for branch, expected in enumerate(reference.logits[:2]):
        rows = logits[branch * depth : (branch + 1) * depth]
        yield Rows(branch, rows, expected[SHARED : SHARED + depth])


WAYS: Mapping[str, Callable[[GraphRunner, Reference], Iterator[Rows]]] = {
    "prefill in one call": _one_call,
    "cached decoding": _single_tokens,
    "chunked prefill": _chunks,
    "ragged batch": _ragged_batch,
    "tree": _tree,
}
