"""Speculative output equal to plain output, token for token; what differs is scored again in float64."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun import Decoder, Request
from forerun.errors import ExportError
from forerun.manifest import ModelRecord
from forerun.oracle import filtered_law
from forerun.randomness import noise_keys
from forerun_export.certify.engines import PART, Split, Tokens, first_split
from forerun_export.certify.graph_checks import smallest_rate
from forerun_export.certify.margins import race_margin
from forerun_export.certify.report import Finding, verdict
from forerun_export.certify.statistics import POWER
from forerun_export.progress import Report, silent
from forerun_export.reference import Prompt, source_references
from forerun_export.sources import resolve

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that reverses a list.",
    "List five fruits and their colours.",
    "Tell a short story about a lighthouse keeper.",
)
NEW_TOKENS = 24
DRAFTS: Mapping[str, Mapping[str, Any]] = {
    "K = 1": {"draft_length": 1},
    "K = 4": {"draft_length": 4},
    "n-grams": {"draft": "ngram"},
    "adaptive": {},
}
SEEDS = (1, 2)
SAMPLED: Mapping[str, Any] = {"law": "coupled", "temperature": 1.0, "top_p": 0.95}
NUCLEUS_EDGE = 1e-4  # by how much a kernel's error may move the weight at which a nucleus ends


@dataclass(frozen=True)
class Rescored:
    """A difference under the source checkpoint in float64.

    `gap`: how far the two tokens (logits, or logarithms of race scores) are from the best; `error`: by how much the
    built target's logits may be off. A gap within twice that is a tie that a kernel may decide either way.
    """

    split: Split
    gap: float
    error: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap <= 2 * self.error

    def __str__(self) -> str:
        said = "tie within kernel error" if self.is_tie else "BUG"
        return f"{said}: {self.split.plain} or {self.split.speculative}, gap {self.gap:.1e}, error {self.error:.1e}"


def equality(decoder: Decoder, prompts: Sequence[str] = PROMPTS, *, report: Report = silent) -> Iterator[Finding]:
    """Greedy on every prompt, and `coupled` for every prompt and seed: each with every kind of draft, in a batch."""
    tokens = [tuple(decoder.tokenizer.chat([{"role": "user", "content": prompt}])) for prompt in prompts]
    report("Comparing with plain decoding", 0, 2)
    yield _finding(decoder, "greedy", list(splits(decoder, tokens, [None], {})), len(tokens) * len(DRAFTS))
    report("Comparing with plain decoding", 1, 2)
    cases = len(tokens) * len(SEEDS) * len(DRAFTS)
    yield _finding(decoder, "coupled", list(splits(decoder, tokens, SEEDS, SAMPLED)), cases)


def splits(
    decoder: Decoder, prompts: Sequence[Tokens], seeds: Sequence[int | None], controls: Mapping[str, Any]
) -> Iterator[Split]:
    """Each text that speculation changes: plain decoding is one prompt at a time, speculation a batch of all."""
    given = {**controls, "max_new_tokens": NEW_TOKENS}
    for seed in seeds:
        plain = [decoder.generate(list(prompt), draft="none", seed=seed, **given).token_ids for prompt in prompts]
        for draft in drafts_within(decoder.manifest.limits.draft_length):
            requests = [Request.of(prompt, **draft, seed=seed, **given) for prompt in prompts]
            texts = decoder.generate(requests)
            for prompt, alone, text in zip(prompts, plain, texts, strict=True):
                if split := first_split(prompt, alone, text.token_ids, seed):
                    yield split


def drafts_within(longest: int) -> Iterator[dict[str, Any]]:
    """The controls of DRAFTS, with draft lengths that engines take."""
    for controls in DRAFTS.values():
        yield {name: min(value, longest) if name == "draft_length" else value for name, value in controls.items()}


def _finding(decoder: Decoder, law: str, found: Sequence[Split], cases: int) -> Finding:
    scored = [rescored(decoder.manifest.target, split) for split in found]
    bugs = [one for one in scored if one is None or not one.is_tie]
    figure = f"{cases - len(found)} of {cases} texts equal"
    if scored:
        figure += "; " + "; ".join(str(one or _unscored(decoder.manifest.target)) for one in scored)
    kind = "greedy" if law == "greedy" else "coupled, seeds and top-p"
    drafts = ", ".join(DRAFTS)
    return Finding(
        part=PART,
        shown=f"{kind}: speculative output is plain output, token for token ({drafts}; batches)",
        figure=figure,
        power=f"a change in {smallest_rate(cases * NEW_TOKENS, POWER):.1%} of tokens ({POWER:.0%})",
        status=verdict(not bugs),
        numbers={
            "law": law,
            "texts": cases,
            "differences": [str(one) if one else "not scored" for one in scored],
            "bugs": len(bugs),
        },
    )


def _unscored(target: ModelRecord) -> str:
    if target.precision != "fp32":
        return f"BUG: rows in {target.precision} are bit-identical, so rounding explains nothing"
    return "not scored: the checkpoint is not here"


def rescored(target: ModelRecord, split: Split) -> Rescored | None:
    """The two tokens under the source checkpoint in float64.

    None where that is not on this machine, and for a quantized target, whose law is not the checkpoint's.
    """
    if target.precision != "fp32":
        return None
    try:
        source = resolve(target.source)
        variant = tuple(target.layers_left_out)
        reference = source_references(source, [Prompt(split.context)], variants=[variant])[variant]
    except ExportError:
        return None
    logits = reference.logits[0][-1]
    error = target.parity.bound if target.parity is not None else reference.rounding[0]
    return Rescored(split, gap(logits.tolist(), split), error)


def gap(logits: Sequence[float], split: Split) -> float:
    """How far the less likely of the two tokens is from being chosen; infinite for one that could not be."""
    said = (split.plain, split.speculative)
    if min(said) < 0:
        return math.inf
    if split.seed is None:
        return float(np.max(logits)) - min(logits[token] for token in said)
    keys, position = noise_keys(split.seed), len(split.context)
    laws = [
        filtered_law(logits, SAMPLED["temperature"], top_p=SAMPLED["top_p"] + shift)
        for shift in (0.0, -NUCLEUS_EDGE, NUCLEUS_EDGE)
    ]
    return max(min(race_margin(law, keys, position, token).margin for law in laws) for token in said)
