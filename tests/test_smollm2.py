"""The default pair from checkpoint to text: what the README promises, on the real model."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forerun
from forerun.directory import EngineDirectory
from forerun.invariants import violations
from forerun_export.build import export
from forerun_export.eager import load_eager
from forerun_export.recipe import read_recipe
from forerun_export.sources import resolve

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that reverses a list.",
    "List five fruits and their colours.",
    "Tell a short story about a lighthouse keeper.",
)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Iterator[forerun.Decoder]:
    with forerun.open(smollm2) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def plain(decoder: forerun.Decoder) -> list[forerun.Generation]:
    return [decoder.generate(prompt, max_new_tokens=NEW_TOKENS, draft="none") for prompt in PROMPTS]


def test_a_second_export_finds_everything_built(smollm2: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in smollm2.rglob("*")}
    assert not export(read_recipe(smollm2.with_suffix(".toml")), smollm2).built
    assert {path: path.stat().st_mtime_ns for path in smollm2.rglob("*")} == before


def test_the_directory_is_whole_and_its_draft_is_the_trained_head(smollm2: Path) -> None:
    engines = EngineDirectory.open(smollm2)
    assert engines.verify() == []
    draft = engines.manifest.draft
    assert draft is not None
    assert draft.is_head
    assert (engines.manifest.target.precision, draft.precision) == ("fp32", "int8")


def test_both_graphs_are_within_rounding_of_their_checkpoint(smollm2: Path) -> None:
    manifest = EngineDirectory.open(smollm2).manifest
    for record in (manifest.target, manifest.draft):
        assert record is not None
        assert record.parity is not None
        assert record.parity.max_error <= record.parity.bound < 1e-2


def test_plain_text_is_what_transformers_generates(
    smollm2_gguf: Path, decoder: forerun.Decoder, plain: list[forerun.Generation]
) -> None:
    model = load_eager(resolve(str(smollm2_gguf)))
    prompt = decoder.tokenizer.chat([{"role": "user", "content": PROMPTS[0]}])
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert tokens[0, len(prompt) :].tolist() == list(plain[0].token_ids)


@pytest.mark.parametrize("draft_length", [1, 4, 7])
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_speculation_gives_the_tokens_of_plain_decoding(
    decoder: forerun.Decoder, plain: list[forerun.Generation], batch: int, draft_length: int
) -> None:
    found = decoder.generate(list(PROMPTS[:batch]), max_new_tokens=NEW_TOKENS, draft_length=draft_length)
    assert [text.token_ids for text in found] == [text.token_ids for text in plain[:batch]]
    assert sum(text.stats.accepted for text in found) > 0
    assert all(text.stats.rounds < NEW_TOKENS for text in found)


@pytest.mark.parametrize("draft", ["auto", "model", "ngram"])
def test_whatever_pays_gives_the_tokens_of_plain_decoding(
    decoder: forerun.Decoder, plain: list[forerun.Generation], draft: str
) -> None:
    found = decoder.generate(list(PROMPTS), max_new_tokens=NEW_TOKENS, draft=draft)
    assert [text.token_ids for text in found] == [text.token_ids for text in plain]


def test_a_text_that_says_itself_again_is_drafted_from_itself(decoder: forerun.Decoder) -> None:
    prompt = "one two three four five six seven eight nine ten. " * 4
    plain = decoder.generate(prompt, raw=True, max_new_tokens=NEW_TOKENS, draft="none")
    found = decoder.generate(prompt, raw=True, max_new_tokens=NEW_TOKENS, draft="ngram", draft_length=6)
    assert found.token_ids == plain.token_ids
    assert found.stats.acceptance_rate > 0.6
    assert found.stats.rounds <= NEW_TOKENS / 2


def test_a_sampled_text_with_a_seed_is_the_same_alone_and_beside_others(decoder: forerun.Decoder) -> None:
    controls = {"temperature": 1.0, "seed": 7, "max_new_tokens": NEW_TOKENS, "law": "block"}
    alone = decoder.generate(PROMPTS[1], **controls)
    others = [forerun.Request.of(prompt, max_new_tokens=30) for prompt in PROMPTS[2:]]
    together = decoder.generate([*others, forerun.Request.of(PROMPTS[1], **controls)])
    assert together[-1].token_ids == alone.token_ids


@pytest.mark.parametrize("controls", [{}, {"top_p": 0.9, "repetition_penalty": 1.2}])
def test_coupled_speculation_gives_the_tokens_of_plain_sampling(
    decoder: forerun.Decoder, controls: dict[str, float]
) -> None:
    requests = [
        forerun.Request.of(prompt, temperature=1.0, seed=5, max_new_tokens=NEW_TOKENS, draft_length=4, **controls)
        for prompt in PROMPTS[:2]
    ]
    plain = [decoder.generate(replaced(request, draft="none")) for request in requests]
    assert [text.token_ids for text in decoder.generate(requests)] == [text.token_ids for text in plain]


def replaced(request: forerun.Request, **controls: object) -> forerun.Request:
    return forerun.Request(request.prompt, dataclasses.replace(request.controls, **controls))


def test_the_caches_hold_exactly_the_committed_tokens_after_every_round(decoder: forerun.Decoder) -> None:
    for _ in decoder.stream(PROMPTS[0], max_new_tokens=12, draft_length=4):
        assert violations(decoder) == []
