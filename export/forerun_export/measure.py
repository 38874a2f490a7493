"""`make measure`: the figures of the README, from one engine directory.

    python -m forerun_export.measure engines/smollm2

Everything is counted on the built engines: equality of speculative and plain tokens, equality of logits bit by bit,
speed, and what a round costs outside engines.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import forerun
from forerun.manifest import Manifest
from forerun_export.graph_runner import Floats, GraphRunner

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that reverses a list.",
    "List five fruits and their colours.",
    "Tell a short story about a lighthouse keeper.",
)
DRAFT_LENGTHS = range(1, 8)
BATCHES = range(1, 5)
CAPACITIES = (256, 512)
NEW_TOKENS = 48


def main(directory: Path) -> None:
    """Print every figure; exit with 1 where speculation changed a token or a bit."""
    with forerun.open(directory) as decoder:
        plain = [decoder.generate(prompt, max_new_tokens=NEW_TOKENS, draft="none") for prompt in PROMPTS]
        tokens = list(_token_equality(decoder, plain))
        print(f"greedy tokens equal to plain decoding: {sum(tokens)} of {len(tokens)} texts")
        prompt_ids = [decoder.tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
        _print_speed(decoder)
    sequences = [[*ids, *generation.token_ids] for ids, generation in zip(prompt_ids, plain, strict=True)]
    rows = list(_bit_equality(directory, sequences, [len(ids) for ids in prompt_ids]))
    print(f"verified rows bit-identical to plain decoding: {sum(rows)} of {len(rows)}")
    sys.exit(0 if all(tokens) and all(rows) else 1)


def _token_equality(decoder: forerun.Decoder, plain: Sequence[forerun.Generation]) -> Iterator[bool]:
    """For each K and batch: whether each text has the tokens of plain decoding."""
    for draft_length in DRAFT_LENGTHS:
        for batch in BATCHES:
            prompts = list(PROMPTS[:batch])
            texts = decoder.generate(prompts, max_new_tokens=NEW_TOKENS, draft_length=draft_length)
            yield from (text.token_ids == plain[row].token_ids for row, text in enumerate(texts))


def _bit_equality(directory: Path, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[bool]:
    """For each capacity, batch and K: whether each verified row [V] has the bits that plain decoding gives it."""
    target = Manifest.read(directory / "manifest.json").target
    runner = GraphRunner(directory / target.graph, weights_folder=(directory / target.weights).parent)
    plain = [
        _logits(runner, [tokens], [start], 0, CAPACITIES[0])[0] for tokens, start in zip(sequences, starts, strict=True)
    ]
    for capacity in CAPACITIES:
        for batch in BATCHES:
            for draft_length in DRAFT_LENGTHS:
                seen = _logits(runner, sequences[:batch], starts[:batch], draft_length, capacity)
                for row in range(batch):
                    yield from (np.array_equal(one, other) for one, other in zip(seen[row], plain[row], strict=False))


def _logits(
    runner: GraphRunner,
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    draft_length: int,
    capacity: int,
) -> list[list[Floats]]:
    """Logits [V] of every position from each row's start on, in calls of K + 1 tokens, prompts read row by row."""
    width, batch = draft_length + 1, len(sequences)
    caches = runner.new_caches(batch, capacity)
    longest = max(starts)
    padded = [[*tokens[: start - 1], *[0] * (longest - start)] for tokens, start in zip(sequences, starts, strict=True)]
    runner.run(caches, padded, [0] * batch, logit_rows=[[0]] * batch)
    rows: list[list[Floats]] = [[] for _ in sequences]
    steps = min(len(tokens) - start for tokens, start in zip(sequences, starts, strict=True))
    for step in range(0, steps + 1 - width, width):
        places = [start - 1 + step for start in starts]
        window = [tokens[place : place + width] for tokens, place in zip(sequences, places, strict=True)]
        for row, logits in enumerate(runner.run(caches, window, places)):
            rows[row] += list(logits)
    return rows


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"draft": "none"},
    "speculative": {"draft": "model", "draft_length": 4},
    "plain, T = 1": {"draft": "none", "temperature": 1.0, "seed": 1},
    "speculative, T = 1, residual": {"temperature": 1.0, "seed": 1, "law": "residual", "draft_length": 4},
    "speculative, T = 1, block": {"temperature": 1.0, "seed": 1, "law": "block", "draft_length": 4},
    "speculative, T = 1, coupled": {"temperature": 1.0, "seed": 1, "law": "coupled", "draft_length": 4},
    "n-grams": {"draft": "ngram"},
    "adaptive": {},
}


def _print_speed(decoder: forerun.Decoder) -> None:
    """A line for each setting; the prompts are run in turn under all of them, twice."""
    runs: dict[str, list[forerun.Stats]] = {name: [] for name in SETTINGS}
    for prompt in PROMPTS * 2:
        for name, controls in SETTINGS.items():
            runs[name].append(decoder.generate(prompt, max_new_tokens=NEW_TOKENS, **controls).stats)
    for name, stats in runs.items():
        rate = statistics.median(run.tokens_per_s for run in stats)
        per_call = sum(run.emitted for run in stats) / sum(run.rounds for run in stats)
        outside = statistics.median(1 - run.engine_s / run.decode_s for run in stats)
        host = max(run.host_bytes_per_round for run in stats)
        print(
            f"{name}: {rate:.1f} tokens/s, {per_call:.2f} tokens per target call, {outside:.1%} of the time outside "
            f"engines, {host:.0f} bytes to the host per round"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
