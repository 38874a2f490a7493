"""What is reported of an engine in a category, from its runs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun_export.bench.engines import PLAIN, Engine
from forerun_export.bench.lossless import Lossless, lossless
from forerun_export.bench.measuring import Measured, Settings
from forerun_export.bench.runs import Round, Run, median_runs
from forerun_export.bench.statistics import Estimate, Spread, percentile, rate, speed_up, spread

REFERENCES = {PLAIN: "forerun plain", "torch": "PyTorch", "onnxruntime-genai": "onnxruntime-genai"}
"""Plain decoding that others are set in relation to, with its name in tables."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Seconds, rates and counts of an engine in a category; None where the runs or the library do not tell.

    tokens_per_s: of decoding, that is of everything behind the first tokens; of all prompts together.
    speed_ups: over the plain decoding of REFERENCES, prompt by prompt.
    prompt_tokens_per_s, prompt_speed_ups: the same of each prompt by itself; an answer without decoded tokens has none.
    first_token_s: from the request to the first tokens, median and 95th percentile over prompts.
    prefill_tokens_per_s: prompt tokens over that time.
    token_s: of a token its share of its round, median and 95th percentile over tokens.
    acceptance: of the rounds that proposed a token at a place, the share that kept it.
    draft_length: mean K of all rounds. rounds_by_draft: the share of rounds in which each draft proposed; `none` is the
    share in which nothing was.
    """

    engine: str
    prompts: int
    tokens: int
    tokens_per_s: Estimate | None
    speed_ups: Mapping[str, Estimate]
    prompt_tokens_per_s: Spread | None
    prompt_speed_ups: Mapping[str, Spread]
    first_token_s: tuple[float | None, float | None]
    prefill_tokens_per_s: float | None
    token_s: tuple[float | None, float | None]
    tokens_per_target_call: float | None
    acceptance: Sequence[float] | None
    draft_length: float | None
    rounds_by_draft: Mapping[str, float] | None
    lossless: Lossless

    def to_json(self) -> dict[str, Any]:
        """As an object of the report's JSON."""
        return {
            "engine": self.engine,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s and self.tokens_per_s.to_json(),
            "speed_ups": {name: one.to_json() for name, one in self.speed_ups.items()},
            "per_prompt": {
                "tokens_per_s": self.prompt_tokens_per_s and self.prompt_tokens_per_s.to_json(),
                "speed_ups": {name: one.to_json() for name, one in self.prompt_speed_ups.items()},
            },
            "first_token_s": dict(zip(("p50", "p95"), self.first_token_s, strict=True)),
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "token_s": dict(zip(("p50", "p95"), self.token_s, strict=True)),
            "tokens_per_target_call": self.tokens_per_target_call,
            "acceptance_by_position": self.acceptance and list(self.acceptance),
            "mean_draft_length": self.draft_length,
            "rounds_by_draft": self.rounds_by_draft and dict(self.rounds_by_draft),
            "lossless": self.lossless.to_json(),
        }


def summary(engine: Engine, measured: Measured, settings: Settings, category: str | None = None) -> Summary | None:
    """What an engine did in a category, or in all together; None where it has no run."""
    runs = median_runs(measured.of(engine.name, category))
    if not runs:
        return None
    first = [run.first_token_s for run in runs]
    times = [seconds for run in runs for seconds in run.token_times()]
    rounds = [one for run in runs for one in run.output.rounds]
    proposed = [one.proposed for one in rounds if one.proposed is not None]
    return Summary(
        engine=engine.name,
        prompts=len(runs),
        tokens=sum(len(run.output.tokens) for run in runs),
        tokens_per_s=rate([run.decoded for run in runs], [run.decode_s for run in runs]),
        speed_ups=dict(_speed_ups(runs, measured, category)),
        prompt_tokens_per_s=spread([run.decoded / run.decode_s for run in runs if run.decoded]),
        prompt_speed_ups=dict(_prompt_speed_ups(runs, measured, category)),
        first_token_s=(percentile(first, 0.5), percentile(first, 0.95)),
        prefill_tokens_per_s=sum(run.prompt_tokens for run in runs) / sum(first),
        token_s=(percentile(times, 0.5), percentile(times, 0.95)),
        tokens_per_target_call=sum(one.tokens for one in rounds) / len(rounds),
        acceptance=acceptance_by_position(runs),
        draft_length=sum(proposed) / len(proposed) if proposed else None,
        rounds_by_draft=_rounds_by_draft(rounds) if proposed else None,
        lossless=lossless(engine, measured, settings, category),
    )


def _rounds_by_draft(rounds: Sequence[Round]) -> dict[str, float]:
    counts = Counter(one.draft or "none" for one in rounds)
    return {draft: count / len(rounds) for draft, count in counts.most_common()}


def _speed_ups(runs: Sequence[Run], measured: Measured, category: str | None) -> Iterator[tuple[str, Estimate]]:
    for name in REFERENCES:
        if found := against(runs, median_runs(measured.of(name, category))):
            yield name, found


def _prompt_speed_ups(runs: Sequence[Run], measured: Measured, category: str | None) -> Iterator[tuple[str, Spread]]:
    for name in REFERENCES:
        pairs = _paired(runs, median_runs(measured.of(name, category)))
        both = [(run, other) for run, other in pairs if run.decoded and other.decoded]
        ratios = [run.decoded / run.decode_s / (other.decoded / other.decode_s) for run, other in both]
        if found := spread(ratios):
            yield name, found


def against(runs: Sequence[Run], others: Sequence[Run]) -> Estimate | None:
    """How many times faster runs decode than others of the same prompts."""
    pairs = _paired(runs, others)
    return speed_up([(run.decoded, run.decode_s, other.decoded, other.decode_s) for run, other in pairs])


def _paired(runs: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, Run]]:
    known = {run.prompt: run for run in others}
    return [(run, known[run.prompt]) for run in runs if run.prompt in known]


def acceptance_by_position(runs: Sequence[Run]) -> list[float] | None:
    """Of the rounds that proposed a token at place i, the share that kept it; None where nothing was proposed."""
    rounds = [one for run in runs for one in run.output.rounds if one.proposed and one.accepted is not None]
    longest = max((one.proposed or 0 for one in rounds), default=0)
    if not longest:
        return None
    kept = [sum((one.accepted or 0) > place for one in rounds) for place in range(longest)]
    tried = [sum((one.proposed or 0) > place for one in rounds) for place in range(longest)]
    return [count / of for count, of in zip(kept, tried, strict=True)]
