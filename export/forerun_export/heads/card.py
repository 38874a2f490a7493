"""The card of a trained head: its README.md."""

from collections.abc import Mapping
from dataclasses import dataclass

from forerun_export.heads.folder import HeadFigures, HeadRecord


@dataclass(frozen=True)
class Data:
    """What a head was trained on.

    `sources` names the prompts of the answers, `passages` is told of plain text, if any was read; `learnt_tokens` are
    those of all `texts`: answers, their prompts, passages.
    `coverage` is the share of held-out answers' tokens that the head can propose; `overlaps` tell of each held-out file
    how much of it stands in what is learnt.
    """

    answers: int
    answer_tokens: int
    passages: str
    texts: int
    learnt_tokens: int
    sources: str
    head_tokens: int
    coverage: float
    overlaps: tuple[str, ...] = ()


def card(record: HeadRecord, data: Data, drafts: Mapping[str, Mapping[str, HeadFigures]], *, target: str) -> str:
    """Markdown. `drafts` are the figures by draft (the head first) and kind of held-out prompt."""
    training = record.training
    assert training is not None
    commands = "\n\nand from that head on by\n\n".join(f"    {run.command}" for run in training.runs)
    steps, tokens = (sum(numbers) for numbers in zip(*((run.steps, run.tokens) for run in training.runs), strict=True))
    of_the_last = ", of the last training" if training.start else ""
    passages = f"And {data.passages}. " if data.passages else ""
    layers = ", ".join(str(layer) for layer in record.feature_layers)
    return f"""# Draft head for {target}

One decoder layer that reads the target's hidden states behind layers {layers} and proposes its next tokens
(of {data.head_tokens:,} candidates), in the shape of EAGLE-3 (2503.01840). Made by

{commands}

* **Target**: checkpoint with SHA-256 `{record.target.sha256}`. For no other model.
* **Data**{of_the_last}: {data.answers:,} answers ({data.answer_tokens:,} tokens) that the target itself gave,
  half of them greedily and half at temperature 1, to {data.sources}.
  {passages}{data.learnt_tokens:,} tokens are learnt, those of prompts among them.
* **Candidates**: those of the largest expected counts; {data.coverage:.1%} of the tokens of held-out answers are such.
* **Training**: {steps:,} steps over {tokens:,} tokens (repeats counted), {training.unrolled}
  drafting steps deep, all but the first on the head's own outputs; seed {training.seed}.
* **Licence**: the target's.

## Held-out prompts

Greedy: how often the drafted token is the target's. T = 1: sum min(p, q), the probability that it is accepted. Each by
drafted token (first, second, ..), where all before it were right. Tokens a call: what a call of the target gives
greedily with 1, 2, .. tokens drafted.

{_overlaps(data)}{_table(drafts)}
"""


def _overlaps(data: Data) -> str:
    lines = "".join(f"* {one}\n" for one in data.overlaps)
    return f"How much of these prompts is learnt, by n-grams:\n\n{lines}\n" if lines else ""


def _table(drafts: Mapping[str, Mapping[str, HeadFigures]]) -> str:
    lines = ["| prompts | draft | greedy | T = 1 | tokens a call |", "| --- | --- | --- | --- | --- |"]
    kinds = dict.fromkeys(kind for figures in drafts.values() for kind in figures)
    for kind in kinds:
        for name, figures in drafts.items():
            if kind in figures:
                one = figures[kind]
                cells = (_rates(one.greedy), _rates(one.overlap), _rates(one.tokens_a_call))
                lines.append(f"| {kind} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rates(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "-"
