"""N-gram drafts through the whole runtime: what they propose, what is counted, and where they are refused."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import forerun
from forerun import RequestError
from forerun.cli import main
from helpers.reference import greedy
from helpers.table_models import engine_directory, script_after, scripted, table_pair

PROMPT = [9, 1, 2, 3, 4, 5, 6, 9]
COPY = [1, 2, 3, 4, 5, 6, 7]


def copying(tmp_path: Path) -> Path:
    """A target without a draft that says again what the prompt said."""
    model = scripted(script_after(len(PROMPT), COPY), vocabulary=10)
    return engine_directory(tmp_path / "engines", model, end_tokens=[7])


def test_a_copied_text_is_proposed_whole(tmp_path: Path) -> None:
    with forerun.open(copying(tmp_path)) as decoder:
        generation = decoder.generate(PROMPT, draft="ngram", draft_length=8)
    assert list(generation.token_ids) == COPY
    assert generation.stats.accepted == 6
    assert generation.stats.rounds == 1
    assert generation.stats.to_json()["by_draft"] == {"ngram": {"rounds": 1, "proposed": 8, "accepted": 6}}


def test_engines_without_a_draft_draft_from_the_text_by_themselves(tmp_path: Path) -> None:
    with forerun.open(copying(tmp_path)) as decoder:
        for controls in ({}, {"draft_length": 3}, {"temperature": 1.0, "seed": 1, "law": "residual"}):
            generation = decoder.generate(PROMPT, **controls)
            assert list(generation.token_ids) == COPY
            assert generation.stats.draft == "ngram"


@pytest.mark.parametrize("controls", [{}, {"draft_length": 5}], ids=["adaptive", "fixed"])
@pytest.mark.parametrize("draft", ["ngram", "auto"])
def test_greedy_text_is_that_of_plain_python(tmp_path: Path, draft: str, controls: dict[str, int]) -> None:
    pair = table_pair(tmp_path / "engines", vocabulary=4)
    with pair.open() as decoder:
        prompts = [[1], [2, 2, 2, 2], [0, 1, 2, 3, 0, 1], [3, 1] * 8]
        found = decoder.generate(prompts, max_new_tokens=40, draft=draft, **controls)
    assert [one.token_ids for one in found] == [greedy(pair.target, prompt, 40) for prompt in prompts]


def test_a_seeded_text_under_residual_is_the_same_alone_and_in_any_company(tmp_path: Path) -> None:
    pair = table_pair(tmp_path / "engines", vocabulary=4)
    controls = {"temperature": 1.0, "law": "residual", "seed": 4, "max_new_tokens": 30, "draft": "ngram"}
    with pair.open() as decoder:
        alone = decoder.generate([1, 2, 1], **controls)
        request = forerun.Request.of([1, 2, 1], **controls)
        others = [forerun.Request.of([place], temperature=1.0, max_new_tokens=20) for place in range(4)]
        assert decoder.generate([*others, request])[-1].token_ids == alone.token_ids
        assert decoder.generate([1, 2, 1], **controls).token_ids == alone.token_ids
    assert alone.stats.by_draft["ngram"].accepted > 0


def test_without_a_draft_model_one_is_refused_and_ngram_named(tmp_path: Path) -> None:
    with (
        forerun.open(copying(tmp_path)) as decoder,
        pytest.raises(RequestError, match="this engine directory has none; export one with --draft, or use ngram"),
    ):
        decoder.generate([1], draft="model")


def test_the_command_line_drafts_from_the_text_without_loading_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = table_pair(tmp_path / "engines", vocabulary=4)
    monkeypatch.setattr("forerun.decoder.ModelDraft", lambda *_: pytest.fail("a draft model was loaded"))
    result = CliRunner().invoke(main, ["generate", str(pair.path), "w1 w2 w1", "--raw", "--draft", "ngram", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["stats"]["draft"] == "ngram"


def test_edits_are_right_at_every_place_behind_an_ngrams_proposals(tmp_path: Path) -> None:
    """What may come next depends on the proposals before it: a repeated n-gram is banned inside a run."""
    pair = table_pair(tmp_path / "engines", vocabulary=4)
    controls = {"max_new_tokens": 25, "no_repeat_ngram": 4, "frequency_penalty": 0.4}
    with pair.open() as decoder:
        plain = decoder.generate([1, 2, 1, 2, 1], draft="none", **controls)
        found = decoder.generate([1, 2, 1, 2, 1], draft="ngram", draft_length=6, **controls)
    assert found.token_ids == plain.token_ids
    assert found.stats.proposed > 10
