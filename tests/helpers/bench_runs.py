"""Runs of a benchmark made by hand, and what is needed around them."""

from collections.abc import Mapping, Sequence

from forerun_export.bench.engines import PLAIN, Engine
from forerun_export.bench.measuring import Measured
from forerun_export.bench.runs import Output, Round, Run

PLAIN_ENGINE = Engine(name=PLAIN, label="plain", worker=PLAIN, plain=PLAIN)
DRAFTED = Engine(name="forerun-model", label="drafted", worker="forerun-model", plain=PLAIN, draft="model")
TORCH = Engine(name="torch", label="PyTorch", worker="torch", plain="torch")
ASSISTED = Engine(name="torch-assisted", label="assisted", worker="torch-assisted", plain="torch")

FIRST_S = 0.5


def one_round(at_s: float, accepted: int, proposed: int, seconds: Mapping[str, float] | None = None) -> Round:
    """A round that emits accepted + 1 tokens."""
    spent = seconds or {"target": 0.0, "draft": 0.0, "sampling": 0.0}
    return Round(at_s, accepted + 1, proposed, accepted, "model" if proposed else None, spent)


def made_run(
    engine: Engine, prompt: int, rounds: Sequence[Round], tokens: Sequence[int] = (), category: str = "a"
) -> Run:
    """A run of 10 prompt tokens; its first round comes at FIRST_S and is not among `rounds`."""
    first = one_round(FIRST_S, 0, 0)
    return Run(engine.name, category, prompt, 10, Output(tuple(tokens), (first, *rounds)))


def plain_run(
    prompt: int, seconds: float, count: int, tokens: Sequence[int] = (), engine: Engine = PLAIN_ENGINE
) -> Run:
    """Plain decoding of `count` tokens behind the first one, `seconds` each, all of it in the target."""
    spent = {"target": seconds, "draft": 0.0, "sampling": 0.0}
    rounds = [one_round(FIRST_S + seconds * number, 0, 0, spent) for number in range(1, count + 1)]
    return made_run(engine, prompt, rounds, tokens)


def measured_of(*runs: Run) -> Measured:
    """What a benchmark keeps of these runs."""
    return Measured(runs=list(runs))
