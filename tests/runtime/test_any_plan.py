"""Whatever is planned, tokens are the target's: rounds may change draft and draft length, row by row, as they like."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import forerun
from forerun import Decoder, Request
from forerun.invariants import violations
from forerun.oracle import law_of, plain_law
from forerun.planning import PLAIN, Choice
from helpers.joint_law import p_value
from helpers.random_plans import plan_at_random
from helpers.reference import greedy
from helpers.table_models import TablePair, engine_directory, random_model, table_pair

VOCABULARY, CONTEXT, POSITIONS, ROWS = 4, 12, 3, 2_000
PROMPT = [1, 2, 1, 3, 1, 2]  # matches itself, in two ways
SIGNIFICANCE = 1e-3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    """Few tokens, so that texts match themselves all the time."""
    return table_pair(tmp_path_factory.mktemp("pair") / "engines", vocabulary=VOCABULARY)


@pytest.fixture
def decoder(pair: TablePair) -> Iterator[Decoder]:
    with pair.open() as decoder:
        yield decoder


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("controls", [{}, {"temperature": 1.0, "law": "coupled"}], ids=["greedy", "coupled"])
def test_greedy_and_coupled_tokens_are_those_of_plain_decoding(
    decoder: Decoder, controls: dict[str, object], seed: int
) -> None:
    prompts = [[1], [1, 2, 3, 1, 2], [0] * 9, [3, 3, 1, 3, 3], [2, 0]]
    requests = [Request.of(prompt, max_new_tokens=30, seed=seed, **controls) for prompt in prompts]
    plain = [decoder.generate(prompt, max_new_tokens=30, seed=seed, draft="none", **controls) for prompt in prompts]
    planner = plan_at_random(decoder, seed=seed)
    found = decoder.generate(requests)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert {"model", "ngram", None} <= set(planner.used)


@pytest.mark.parametrize("law", ["residual", "block"])
def test_sampled_tokens_have_the_joint_law_of_the_target(tmp_path: Path, law: str) -> None:
    target = random_model(21, vocabulary=VOCABULARY, context=CONTEXT, spread=1.0)
    draft = random_model(22, vocabulary=VOCABULARY, context=CONTEXT, spread=1.0)
    with forerun.open(engine_directory(tmp_path / "engines", target, draft, batch=500)) as decoder:
        planner = plan_at_random(decoder, seed=1)
        decoded = decoder.generate(
            [Request.of(PROMPT, temperature=1.0, law=law, max_new_tokens=6) for _ in range(ROWS)]
        )
    assert min(planner.used["model"], planner.used["ngram"]) > ROWS / 2
    counts = Counter(one.token_ids[:POSITIONS] for one in decoded)
    exact = plain_law(lambda context: law_of(target.logits(context), 1.0), positions=POSITIONS, context=tuple(PROMPT))
    assert p_value(counts, exact) > SIGNIFICANCE


@pytest.mark.parametrize("seed", range(4))
def test_every_step_leaves_caches_and_counts_sound(decoder: Decoder, seed: int) -> None:
    plan_at_random(decoder, seed=seed)
    rows = [
        decoder._rows(Request.of([1, 2, 1, 2], max_new_tokens=tokens, temperature=temperature, draft=draft))[0]
        for tokens, temperature, draft in [(9, 0.0, "auto"), (30, 1.0, "auto"), (20, 1.0, "ngram"), (25, 0.0, "model")]
    ]
    decoder._add(rows)
    while any(row.active for row in rows):
        decoder.scheduler.step()
        assert violations(decoder) == []


def test_a_draft_that_falls_far_behind_catches_up_exactly(tmp_path: Path) -> None:
    """The longer it is not asked, the more it reads at once; what it then proposes is what it always would have."""
    with table_pair(tmp_path / "engines", draft="equal", context=400).open() as decoder:
        row = decoder._rows(Request.of([1, 2, 3], max_new_tokens=390))[0]
        decoder._add([row])
        planner = plan_at_random(decoder, seed=0)
        for gap in (1, 2, 3, 40, 150):
            planner._choice = lambda index, row: PLAIN  # type: ignore[method-assign]
            for _ in range(gap):
                decoder.scheduler.step()
            accepted = row.stats.accepted
            planner._choice = lambda index, row: Choice("model", 4)  # type: ignore[method-assign]
            decoder.scheduler.step()
            assert row.stats.accepted == accepted + 4
            assert violations(decoder) == []


def test_rows_of_one_batch_are_judged_by_the_proposals_of_their_own_drafts(pair: TablePair, decoder: Decoder) -> None:
    """The model's steps write into every row's columns; what the other draft says must be what is judged."""
    prompts = [[1, 2, 1], [2, 0, 1, 3, 1, 2, 0]]  # both go on somehow
    rows = [decoder._rows(Request.of(prompt, max_new_tokens=20))[0] for prompt in prompts]
    decoder._add(rows)
    planner = plan_at_random(decoder, seed=0)
    choices = [Choice("model", 3), Choice("ngram", 3)]
    ngrams = decoder.scheduler._loop.drafts["ngram"]
    planner._choice = lambda index, row: choices[index] if ngrams.outlook(index, 3) else PLAIN  # type: ignore[method-assign]
    decoder.scheduler.step()
    judged = [(*chunk.token_ids[: chunk.accepted], *chunk.rejected) for chunk in (row.chunks[0] for row in rows)]
    assert judged == [greedy(pair.draft, prompts[0], 3), (1, 3, 1)]
