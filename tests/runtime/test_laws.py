"""Each law through the whole runtime: what it promises beyond the target's law itself."""

from collections.abc import Iterator

import pytest

import forerun
from forerun import Decoder, Request
from helpers.table_models import DRAFTS, table_pair

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module", params=sorted(DRAFTS))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    pair = table_pair(tmp_path_factory.mktemp(request.param) / "pair", draft=request.param, batch=64)
    with forerun.open(pair.path) as decoder:
        yield decoder


def test_coupled_gives_the_tokens_of_plain_decoding_for_every_draft_length(decoder: Decoder) -> None:
    controls = {"temperature": 0.9, "law": "coupled", "max_new_tokens": 12}
    seeds = range(40)
    plain = decoder.generate([Request.of(PROMPT, seed=seed, draft="none", **controls) for seed in seeds])
    assert len({one.token_ids for one in plain}) > 30
    for draft_length in (1, 2, 5, 8):
        found = decoder.generate(
            [Request.of(PROMPT, seed=seed, draft_length=draft_length, **controls) for seed in seeds]
        )
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]


def test_rows_of_all_laws_share_a_batch_and_say_what_they_say_alone(decoder: Decoder) -> None:
    requests = [
        Request.of(PROMPT, temperature=1.0, seed=seed, law=law, max_new_tokens=10, draft_length=3)
        for seed, law in enumerate(["residual", "block", "coupled", "residual", "block", "coupled"])
    ]
    requests.insert(2, Request.of(PROMPT, max_new_tokens=10))
    alone = [decoder.generate([request])[0] for request in requests]
    together = decoder.generate(requests)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.stats.law for one in together] == [
        "residual", "block", "greedy", "coupled", "residual", "block", "coupled"
    ]  # fmt: skip


def test_block_accepts_at_least_as_much_as_residual(decoder: Decoder) -> None:
    def accepted(law: str) -> int:
        controls = {"temperature": 1.0, "law": law, "max_new_tokens": 40, "draft_length": 6}
        found = decoder.generate([Request.of(PROMPT, seed=seed, **controls) for seed in range(150)])
        return sum(one.stats.accepted for one in found)

    assert accepted("block") >= accepted("residual")


def test_samples_of_one_prompt_differ_and_can_be_repeated(decoder: Decoder) -> None:
    controls = {"temperature": 1.0, "seed": 3, "max_new_tokens": 10}
    samples = decoder.generate(PROMPT, n=4, **controls)
    assert len({sample.token_ids for sample in samples}) == 4
    assert [one.token_ids for one in decoder.generate(PROMPT, n=4, **controls)] == [
        sample.token_ids for sample in samples
    ]
    assert decoder.generate(PROMPT, **controls).token_ids == samples[0].token_ids
    again = decoder.generate(PROMPT, **{**controls, "seed": samples[2].seed})
    assert again.token_ids == samples[2].token_ids
