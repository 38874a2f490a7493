"""Part 3: the built engines end to end, through `Decoder.generate`.

Sampled tokens are counted and compared with the target's own law, which is computed apart from the decoder: the
target's graph run over the same context, its logits turned into a law in float64.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from forerun import Decoder, Request
from forerun.manifest import ModelRecord
from forerun.oracle import Law, acceptance_probability, law_of
from forerun_export.certify.report import Finding, verdict
from forerun_export.certify.statistics import (
    POWER,
    SIGNIFICANCE,
    Cell,
    GTest,
    ScoreTest,
    merged_cells,
    score_test,
)
from forerun_export.graph_runner import GraphRunner
from forerun_export.head_runner import HeadRunner, Runner
from forerun_export.progress import Report, silent

PART = "engines"
LAWS = ("residual", "block")
TEMPERATURE = 1.0
NEW_TOKENS, DRAFT_LENGTH = 3, 2  # two tokens are looked at; a third lets K be 2
ROWS = 32
# Short, since every sample reads its prompt again; of two tokens or more, since first positions are unlike others.
CANDIDATES = ("Dear Sir", "He had a", "The best", "The answer is", "When I", "A man", "In the", "It was")
CAPACITY_STEP = 64

Tokens = tuple[int, ...]
Samples = Mapping[Tokens, Counter[Tokens]]
"""Prompt tokens -> how often each pair of first tokens came."""


class EngineLaws:
    """Next-token laws of a model of the directory, from its graph's logits; of a head, given the target's features.

    After a single token, of which a head has nothing to say, its law is the target's: no proposal, no bias.
    """

    def __init__(self, decoder: Decoder, record: ModelRecord) -> None:
        runner, target = (_runner(decoder, each) for each in (record, decoder.manifest.target))
        self._runner: Runner = HeadRunner(runner, target) if record.is_head else runner
        self._target = target
        self._known: dict[Tokens, Law] = {}

    def __call__(self, context: Tokens) -> Law:
        """The law after these tokens."""
        if context not in self._known:
            capacity = -(-len(context) // CAPACITY_STEP) * CAPACITY_STEP
            runner = self._runner if len(context) > self._runner.first_place else self._target
            logits = runner.run(runner.new_caches(1, capacity), [context], [0])[0, -1]
            self._known[context] = law_of(logits.tolist(), TEMPERATURE)
        return self._known[context]


def _runner(decoder: Decoder, record: ModelRecord) -> GraphRunner:
    file = decoder.directory.file
    return GraphRunner(file(record.graph), weights_folder=file(record.weights).parent)


def sampled(decoder: Decoder, prompts: Sequence[str], *, samples: int, report: Report = silent) -> Iterator[Finding]:
    """For each law of acceptance that samples: a G-test, and a test in the direction of the naive rule.

    Without prompts, after the one of a few short ones at which this pair would show that rule best.
    """
    target = EngineLaws(decoder, decoder.manifest.target)
    draft = EngineLaws(decoder, decoder.manifest.draft) if decoder.manifest.draft else target
    contexts = [tuple(decoder.tokenizer.encode(prompt)) for prompt in prompts or CANDIDATES]
    if not prompts:
        contexts = [min(contexts, key=lambda context: _naive_share(context, target, draft))]
    for law in LAWS:
        drawn = draw(decoder, contexts, law, samples=samples, report=report)
        yield g_test_finding(law, g_test(drawn, target))
        if decoder.manifest.draft:
            yield score_finding(law, naive_score(drawn, target, draft))


def _naive_share(context: Tokens, target: EngineLaws, draft: EngineLaws) -> float:
    p, q = target(context), draft(context)
    return score_test([{0: 1}], [p], [naive_law(p, q)]).smallest_share


def draw(decoder: Decoder, contexts: Sequence[Tokens], law: str, *, samples: int, report: Report = silent) -> Samples:
    """The first two tokens of `samples` sequences, shared out over the contexts; their seeds are 0, 1, 2, .."""
    found: dict[Tokens, Counter[Tokens]] = {context: Counter() for context in contexts}
    # The limit of an engine directory is about memory; these sequences are a few tokens long.
    decoder.scheduler.max_rows = max(ROWS, decoder.manifest.limits.batch)
    controls = {"temperature": TEMPERATURE, "law": law, "max_new_tokens": NEW_TOKENS, "draft_length": DRAFT_LENGTH}
    each = -(-samples // len(contexts))
    step = f"Sampling with {law}"
    for number, context in enumerate(contexts):
        for start in range(0, each, ROWS * 4):
            report(step, number * each + start, each * len(contexts))
            seeds = range(start, min(start + ROWS * 4, each))
            requests = [Request.of(context, seed=seed, **controls) for seed in seeds]
            found[context].update(one.token_ids[:2] for one in decoder.generate(requests))
    return found


def g_test(samples: Samples, law: EngineLaws) -> GTest:
    """First tokens against p, and second tokens against p given the first, wherever there are enough of them."""
    tables: list[list[Cell]] = []
    for context, counts in samples.items():
        firsts = Counter[int]()
        seconds: dict[int, Counter[int]] = {}
        for tokens, count in counts.items():
            firsts[tokens[0]] += count
            if len(tokens) > 1:
                seconds.setdefault(tokens[0], Counter())[tokens[1]] += count
        tables.append(merged_cells(firsts, law(context)))
        for first, counted in seconds.items():
            if counted.total() >= 20:
                tables.append(merged_cells(counted, law((*context, first))))
    return GTest.of(tables)


def naive_score(samples: Samples, target: EngineLaws, draft: EngineLaws) -> ScoreTest:
    """First tokens, scored toward the rule that draws from p after a rejection."""
    counts: list[Counter[int]] = []
    for by_tokens in samples.values():
        firsts = Counter[int]()
        for tokens, count in by_tokens.items():
            firsts[tokens[0]] += count
        counts.append(firsts)
    laws = [target(context) for context in samples]
    biased = [naive_law(target(context), draft(context)) for context in samples]
    return score_test(counts, laws, biased)


def naive_law(p: Law, q: Law) -> Law:
    """What the naive rule emits first: min(p, q) + (1 - sum min(p, q)) p."""
    rejected = 1.0 - acceptance_probability(p, q)
    return [min(p_x, q_x) + rejected * p_x for p_x, q_x in zip(p, q, strict=True)]


def g_test_finding(law: str, test: GTest) -> Finding:
    """What a G-test showed."""
    return Finding(
        part=PART,
        shown=f"{law}: first and second tokens of sampled output have the target's law (G-test)",
        figure=f"G = {test.statistic:.0f}, {test.degrees} degrees, p = {test.p_value:.2g} ({test.samples} counts)",
        power=f"any bias of total variation {test.smallest_bias:.3f} over its bins ({POWER:.0%})",
        status=verdict(test.p_value >= SIGNIFICANCE),
        numbers={
            "law": law,
            "statistic": test.statistic if math.isfinite(test.statistic) else None,
            "degrees": test.degrees,
            "p_value": test.p_value,
            "counts": test.samples,
            "smallest_bias": test.smallest_bias,
        },
    )


def score_finding(law: str, test: ScoreTest) -> Finding:
    """What a test toward the naive rule showed."""
    least = test.smallest_share * test.variation
    told = test.smallest_share <= 1
    return Finding(
        part=PART,
        shown=f"{law}: no bias toward drawing from p after a rejection (score test of first tokens)",
        figure=f"z = {test.z:+.2f}, p = {test.p_value:.2g}",
        power=(
            f"{test.smallest_share:.0%} of that rule's bias, total variation {least:.4f} ({POWER:.0%})"
            if told
            else f"not even that rule, which is off by {test.variation:.4f} here: draft and target are too alike"
        ),
        status=verdict(test.p_value >= SIGNIFICANCE) if told or test.p_value < SIGNIFICANCE else "below power",
        numbers={
            "law": law,
            "z": test.z,
            "p_value": test.p_value,
            "naive_bias": test.variation,
            "smallest_bias": least if told else None,
        },
    )


class Split(NamedTuple):
    """A text on which two ways of decoding differ: the tokens before the first difference, and what each said."""

    context: Tokens
    plain: int
    speculative: int
    seed: int | None


def first_split(prompt: Tokens, plain: Tokens, speculative: Tokens, seed: int | None) -> Split | None:
    """Where two outputs part, if they do; an output that only ends earlier says -1 next."""
    if plain == speculative:
        return None
    length = min(len(plain), len(speculative))
    place = next((i for i in range(length) if plain[i] != speculative[i]), length)
    said = [tokens[place] if place < len(tokens) else -1 for tokens in (plain, speculative)]
    return Split((*prompt, *plain[:place]), said[0], said[1], seed)
