"""`forerun demo`: both ways of decoding, in turn, and what is told of them."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from forerun import Decoder, Generation, Stats
from forerun.cli import main
from forerun.demo import PROMPTS, Comparison, compare, median, summary, to_json
from helpers.table_models import table_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines").path


@pytest.fixture(scope="module")
def decoder(pair: Path) -> Iterator[Decoder]:
    with Decoder(pair) as decoder:
        yield decoder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def took(plain_s: float, speculative_s: float, *, other: bool = False) -> Comparison:
    """Ten tokens in these times; other tokens in one of the runs if `other`."""

    def one(seconds: float, last: int) -> Generation:
        stats = Stats(law="greedy", draft="none", emitted=10, decode_s=seconds)
        return Generation("text", (*range(9), last), 3, "length", 1, stats)

    runs = [one(speculative_s, 9), one(speculative_s, 8 if other else 9)]
    return Comparison(f"took {speculative_s}", [one(plain_s, 9)] * 2, runs, [])


def test_each_prompt_is_decoded_both_ways_and_each_way_goes_first_in_turn(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    stream = decoder.stream
    monkeypatch.setattr(
        decoder,
        "stream",
        lambda prompt, **controls: asked.append((prompt, controls["draft"])) or stream(prompt, **controls),
    )
    first, second = compare(decoder, ["w1", "w2 w3"], repeats=2, max_new_tokens=9, draft="model")
    orders = [["none", "model", "model", "none"], ["model", "none", "none", "model"]]
    assert asked == [*(("w1", draft) for draft in orders[0]), *(("w2 w3", draft) for draft in orders[1])]
    for comparison in (first, second):
        assert comparison.identical
        assert [one.stats.proposed for one in comparison.plain] == [0, 0]
        assert [one.stats.draft for one in comparison.speculative] == ["model", "model"]
        emitted = tuple(token for chunk in comparison.chunks for token in chunk.token_ids)
        assert emitted == comparison.speculative[-1].token_ids == comparison.plain[0].token_ids


def test_the_median_is_shown_not_the_best() -> None:
    comparisons = [took(1, 0.25), took(1, 2), took(1, 0.8), took(1, 0.5), took(1, 1)]
    assert median(comparisons) is comparisons[2]
    assert median(comparisons[:4]) is comparisons[2]
    assert summary(comparisons) == (
        "plain 10.0 tokens/s, speculative 12.5: 1.25 times (median of 5 prompts, 0.50 to 4.00; identical: yes)"
    )
    assert summary(comparisons[:1]) == "plain 10.0 tokens/s, speculative 40.0: 4.00 times (identical: yes)"
    found = to_json(comparisons)
    assert (found["median"], found["speed_up"], found["identical"]) == (2, 1.25, True)


def test_one_other_token_in_one_run_is_told_and_fails(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = took(1, 0.5, other=True)
    assert not wrong.identical
    assert summary([took(1, 1), wrong]).endswith("identical: no)")
    monkeypatch.setattr("forerun.demo.compare", lambda *_, **__: [took(1, 1), wrong])
    result = run("demo", pair)
    assert result.exit_code == 1
    assert "identical: no" in result.stdout


def test_the_command_shows_every_prompt_a_trace_and_the_median(pair: Path) -> None:
    result = run("demo", pair, "w1 w2", "w3", "w4 w5 w6", "--max-new-tokens", 9, "--repeats", 1)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [(line.split()[3], " ".join(line.split()[4:])) for line in lines[1:4]] == [
        ("yes", "w1 w2"),
        ("yes", "w3"),
        ("yes", "w4 w5 w6"),
    ]
    speed_ups = {line.partition("yes")[2].strip(): float(line.split()[2]) for line in lines[1:4]}
    traced = next(line for line in lines if line.startswith("The prompt with the median")).rpartition(": ")[2]
    assert speed_ups[traced] == sorted(speed_ups.values())[1]
    assert sum(line.startswith("round  kept") for line in lines) == 1
    assert "median of 3 prompts" in lines[-1]
    assert lines[-1].endswith("identical: yes)")


def test_the_json_is_the_last_line_of_stdout_and_has_both_generations(pair: Path) -> None:
    result = run("demo", pair, "w1 w2", "--max-new-tokens", 9, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    (only,) = found["prompts"]
    assert (only["prompt"], only["identical"], found["identical"], found["median"]) == ("w1 w2", True, True, 0)
    assert only["plain"]["token_ids"] == only["speculative"]["token_ids"]
    assert only["plain"]["stats"]["draft"] == "none"
    assert only["speculative"]["stats"]["draft"] == "model+ngram"
    assert only["speed_up"] == only["speculative_tokens_per_s"] / only["plain_tokens_per_s"] == found["speed_up"]


def test_without_a_prompt_everyday_ones_are_asked(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compared(_: Decoder, prompts: tuple[str, ...], **options: object) -> list[Comparison]:
        asked.extend(prompts)
        return [dataclasses.replace(took(1, 1), prompt=prompt) for prompt in prompts]

    monkeypatch.setattr("forerun.demo.compare", compared)
    assert run("demo", pair).exit_code == 0
    assert asked[1:] == list(PROMPTS)
    assert len(set(PROMPTS)) % 2 == 1
    assert asked[0] not in PROMPTS  # the warm-up's


def test_a_wrong_directory_is_one_line(tmp_path: Path) -> None:
    result = run("demo", tmp_path / "none")
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
