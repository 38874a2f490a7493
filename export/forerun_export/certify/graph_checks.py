"""Each sampling graph against the oracle on random cases: the same numbers in, the same decisions out."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from forerun.oracle import (
    Keys,
    Law,
    argmax,
    block_step,
    coupled_step,
    greedy_step,
    inverse_cdf,
    keyed_draw,
    one_hot,
    points_step,
    residual_step,
)
from forerun_export.certify import graph_cases as cases
from forerun_export.certify.graph_cases import Random, Shape
from forerun_export.certify.graph_sets import Array, GraphSet
from forerun_export.certify.margins import (
    IMPOSSIBLE,
    Margin,
    block_margin,
    draw_margin,
    race_margin,
    residual_margin,
    worst,
)


class Compared(NamedTuple):
    """One case: what the oracle says, what the graph says, and how far apart that is (None: no difference)."""

    oracle: object
    graph: object
    margin: Margin | None


Check = Callable[[GraphSet, Random, Shape], Iterator[Compared]]
Decision = tuple[int, int]


class Case(NamedTuple):
    """One row of a verification, for the oracle."""

    p_rows: list[Law]
    q_rows: list[Law]
    proposals: list[int]
    accept_uniforms: list[float]
    pair: tuple[float, float]
    keys: Keys
    positions: list[int]


def _cases(feeds: Mapping[str, Array]) -> Iterator[Case]:
    for b, valid in enumerate(feeds["valid"].tolist()):
        yield Case(
            feeds["p"][b, : valid + 1].tolist(),
            feeds["q"][b, :valid].tolist(),
            feeds["tokens"][b, 1 : valid + 1].tolist(),
            feeds["accept_uniforms"][b, :valid].tolist(),
            (float(feeds["draw_uniforms"][b, 0]), float(feeds["draw_uniforms"][b, 1])),
            (int(feeds["noise_keys"][b, 0]), int(feeds["noise_keys"][b, 1])),
            feeds["positions"][b].tolist(),
        )


def _residual(case: Case) -> Decision:
    draw = lambda law: inverse_cdf(law, case.pair)  # noqa: E731
    return residual_step(case.p_rows, case.q_rows, case.proposals, accept_uniforms=case.accept_uniforms, draw=draw)


def _block(case: Case) -> Decision:
    draw = lambda law: inverse_cdf(law, case.pair)  # noqa: E731
    return block_step(case.p_rows, case.q_rows, case.proposals, accept_uniforms=case.accept_uniforms, draw=draw)


def _points(case: Case) -> Decision:
    draw = lambda law: inverse_cdf(law, case.pair)  # noqa: E731
    return points_step(case.p_rows, case.proposals, accept_uniforms=case.accept_uniforms, draw=draw)


def _coupled(case: Case) -> Decision:
    rows = zip(case.p_rows, case.positions, strict=False)
    return coupled_step([keyed_draw(p, case.keys, position) for p, position in rows], case.proposals)


def _residual_margin(case: Case, found: Decision) -> Margin:
    return residual_margin(case.p_rows, case.q_rows, case.proposals, case.accept_uniforms, case.pair, found)


def _block_margin(case: Case, found: Decision) -> Margin:
    return block_margin(case.p_rows, case.q_rows, case.proposals, case.accept_uniforms, case.pair, found)


def _points_margin(case: Case, found: Decision) -> Margin:
    q_rows = [one_hot(x, len(case.p_rows[0])) for x in case.proposals]
    return residual_margin(case.p_rows, q_rows, case.proposals, case.accept_uniforms, case.pair, found)


def _coupled_margin(case: Case, found: Decision) -> Margin:
    n, token = found
    if not 0 <= n <= len(case.proposals) or (n < len(case.proposals) and token == case.proposals[n]):
        return IMPOSSIBLE
    claimed = zip(case.p_rows, case.positions, [*case.proposals[:n], token], strict=False)
    return worst([race_margin(p, case.keys, position, y) for p, position, y in claimed])


def _verification(graph: str, decide: Callable[[Case], Decision], margin: Callable[[Case, Decision], Margin]) -> Check:
    def check(graphs: GraphSet, rng: Random, shape: Shape) -> Iterator[Compared]:
        feeds = cases.verification(rng, shape)
        outputs = graphs.run(graph, feeds)
        decisions = zip(outputs["accepted"].tolist(), outputs["next_token"].tolist(), strict=True)
        for case, found in zip(_cases(feeds), decisions, strict=True):
            expected = decide(case)
            yield Compared(expected, found, None if found == expected else margin(case, found))

    return check


def verify_greedy(graphs: GraphSet, rng: Random, shape: Shape) -> Iterator[Compared]:
    """Comparisons of equal float32 numbers: no difference can be explained."""
    feeds = cases.greedy_verification(rng, shape)
    outputs = graphs.run("verify-greedy", feeds)
    for b, valid in enumerate(feeds["valid"].tolist()):
        expected = greedy_step(feeds["logits"][b, : valid + 1].tolist(), feeds["tokens"][b, 1 : valid + 1].tolist())
        yield _exactly(expected, (int(outputs["accepted"][b]), int(outputs["next_token"][b])))


def draw(graphs: GraphSet, rng: Random, shape: Shape) -> Iterator[Compared]:
    """Plain draws."""
    feeds = cases.drawing(rng, shape)
    yield from _drawn(feeds, graphs.run("draw", feeds)["token"])


def propose(graphs: GraphSet, rng: Random, shape: Shape) -> Iterator[Compared]:
    """Draws of the draft, and that q and the tokens are kept in their places and nowhere else."""
    feeds = cases.drawing(rng, shape)
    outputs = graphs.run("propose", feeds)
    q, tokens, step = feeds["q_in"].copy(), feeds["tokens_in"].copy(), int(feeds["step"][0])
    q[:, step], tokens[:, step + 1] = feeds["p"][:, 0], outputs["token"][:, 0]
    yield from _drawn(feeds, outputs["token"])
    yield _exactly(True, bool(np.array_equal(q, outputs["q_out"]) and np.array_equal(tokens, outputs["tokens_out"])))


def _drawn(feeds: Mapping[str, Array], tokens: Array) -> Iterator[Compared]:
    for b, found in enumerate(tokens[:, 0].tolist()):
        law: Law = feeds["p"][b, 0].tolist()
        pair = (float(feeds["uniforms"][b, 0]), float(feeds["uniforms"][b, 1]))
        keys = (int(feeds["noise_keys"][b, 0]), int(feeds["noise_keys"][b, 1]))
        position = int(feeds["positions"][b, 0])
        coupled = bool(feeds["coupled"][b])
        expected = keyed_draw(law, keys, position) if coupled else inverse_cdf(law, pair)
        if found == expected:
            yield Compared(expected, found, None)
        else:
            far = race_margin(law, keys, position, found) if coupled else draw_margin(law, pair, found)
            yield Compared(expected, found, far)


def draw_greedy(graphs: GraphSet, rng: Random, shape: Shape) -> Iterator[Compared]:
    """The argmax, lowest index on ties."""
    logits = cases.logits(rng, shape.rows, 1, shape.vocabulary_size)
    found = graphs.run("draw-greedy", {"logits": logits})["token"]
    yield from _argmaxes(logits, found)


def propose_greedy(graphs: GraphSet, rng: Random, shape: Shape) -> Iterator[Compared]:
    """The argmax, kept in its place."""
    logits = cases.logits(rng, shape.rows, 1, shape.vocabulary_size)
    step = int(rng.integers(0, shape.draft_length))
    tokens = rng.integers(0, shape.vocabulary_size, (shape.rows, shape.draft_length + 1))
    feeds = {"logits": logits, "step": np.full(shape.rows, step), "tokens_in": tokens}
    outputs = graphs.run("propose-greedy", feeds)
    yield from _argmaxes(logits, outputs["token"])
    tokens[:, step + 1] = outputs["token"][:, 0]
    yield _exactly(True, bool(np.array_equal(tokens, outputs["tokens_out"])))


def _argmaxes(logits: Array, tokens: Array) -> Iterator[Compared]:
    for row, token in zip(logits[:, 0].tolist(), tokens[:, 0].tolist(), strict=True):
        yield _exactly(argmax(row), token)


def _exactly(expected: object, found: object) -> Compared:
    return Compared(expected, found, None if found == expected else IMPOSSIBLE)


def smallest_rate(count: int, power: float) -> float:
    """The share of faulty cases of which `count` random ones contain at least one with this probability."""
    return 1.0 - math.exp(math.log(1.0 - power) / count)


DECISIONS: Mapping[str, Check] = {
    "verify-residual": _verification("verify-residual", _residual, _residual_margin),
    "verify-block": _verification("verify-block", _block, _block_margin),
    "verify-points": _verification("verify-points", _points, _points_margin),
    "verify-coupled": _verification("verify-coupled", _coupled, _coupled_margin),
    "verify-greedy": verify_greedy,
    "draw": draw,
    "draw-greedy": draw_greedy,
    "propose": propose,
    "propose-greedy": propose_greedy,
}
