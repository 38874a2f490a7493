"""`forerun bench` on lookup-table engines, each in a process of its own: what it reports, also when one fails."""

import io
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import PIL.Image
import pytest
from click.testing import CliRunner, Result

from forerun.cli import main
from forerun_export.bench import BenchReport, Choice, Settings, bench
from forerun_export.bench.engines import BASELINES, PLAIN
from forerun_export.bench.measuring import READINGS, TokenPrompt, long_prompt
from forerun_export.bench.plot import save_plot
from forerun_export.bench.prompts import BenchPrompt
from forerun_export.bench.tables import grids
from helpers.table_models import TablePair, table_pair

PROMPTS = [BenchPrompt("chat", "w1 w2"), BenchPrompt("chat", "w3"), BenchPrompt("code", "w4 w5 w6")]
NEW_TOKENS = 12
READ = 40


@pytest.fixture(scope="module", autouse=True)
def enough_memory() -> Iterator[None]:
    """Where it is short, engines share a process or run in groups: what other programs take must not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun_export.bench.available_bytes", lambda: None)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines")


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"category": p.category, "prompt": p.text}) + "\n" for p in PROMPTS))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def benched(pair: TablePair, choice: Choice, **settings: Any) -> BenchReport:
    return bench(pair.path, PROMPTS, settings=Settings(max_new_tokens=NEW_TOKENS, **settings), choice=choice)


@pytest.fixture(scope="module")
def greedy(pair: TablePair) -> BenchReport:
    return benched(pair, Choice(baselines=(), draft_length=3, sweep=(0, 2)), repeats=2, prefill_tokens=READ)


def test_every_engine_ran_every_prompt_as_often_as_asked(greedy: BenchReport) -> None:
    assert greedy.categories == ["chat", "code", "all"]
    for engine in (PLAIN, "forerun-model", "forerun-model-2"):
        assert len(greedy.measured.of(engine)) == 2 * len(PROMPTS)
        assert len(greedy.measured.of(engine, "code")) == 2


def test_outputs_are_those_of_the_decoder_and_lossless(pair: TablePair, greedy: BenchReport) -> None:
    with pair.open() as decoder:
        expected = [decoder.generate(p.text, max_new_tokens=NEW_TOKENS, draft="none").token_ids for p in PROMPTS]
    for engine in (PLAIN, "forerun-model", "forerun-ngram", "forerun-auto", "forerun-model-2"):
        assert all(run.output.tokens == expected[run.prompt] for run in greedy.measured.of(engine))
    found = greedy.summaries["all", "forerun-model"].lossless
    assert (found.status, found.equal, found.texts) == ("equal", 3, 3)
    assert greedy.lossless


def test_rounds_tell_what_was_proposed_and_where_the_time_went(greedy: BenchReport) -> None:
    for one in greedy.measured.of("forerun-model"):
        assert sum(found.tokens for found in one.output.rounds) == len(one.output.tokens) == NEW_TOKENS
        stamps = [found.at_s for found in one.output.rounds]
        assert stamps == sorted(stamps)
        for timed in one.timed_rounds():
            assert timed.round.seconds is not None
            assert 0 < sum(timed.round.seconds.values()) <= timed.taken_s
    assert (greedy.summaries["all", "forerun-model"].tokens_per_target_call or 0) > 1


def test_rounds_are_shared_out_over_the_drafts_that_proposed(greedy: BenchReport) -> None:
    for engine, others in (("forerun-model", {"ngram"}), ("forerun-ngram", {"model"}), (PLAIN, {"model", "ngram"})):
        shares = greedy.summaries["all", engine].rounds_by_draft
        assert shares is not None
        assert sum(shares.values()) == pytest.approx(1)
        assert not others & shares.keys()
    assert "model" in (greedy.summaries["all", "forerun-model"].rounds_by_draft or {})


def test_what_an_adaptive_engine_goes_by_is_told(greedy: BenchReport) -> None:
    told = {one["name"]: one["profile"] for one in greedy.to_json()["engines"]}
    assert told[PLAIN] is None
    assert len(told["forerun-auto"]["target_s"]) == 9
    assert min(told["forerun-auto"]["target_s"]) > 0


def test_plain_engines_read_long_prompts_and_others_do_not(greedy: BenchReport) -> None:
    assert [(one.engine, one.tokens) for one in greedy.measured.readings] == [(PLAIN, READ)] * READINGS
    (told,) = greedy.to_json()["prefill"]
    assert (told["engine"], told["tokens"]) == (PLAIN, READ)
    assert told["tokens_per_s"] == pytest.approx(READ / told["seconds"])
    assert all(len(run.output.tokens) == NEW_TOKENS for run in greedy.measured.runs)  # they are no runs


def test_a_long_prompt_is_all_prompts_from_another_one_on_each_time() -> None:
    prompts = [TokenPrompt("a", (1, 2)), TokenPrompt("b", (3,)), TokenPrompt("a", (4, 5, 6))]
    assert long_prompt(prompts, 4, begin=0) == (1, 2, 3, 4)
    assert long_prompt(prompts, 9, begin=1) == (3, 4, 5, 6, 1, 2, 3, 4, 5)
    assert long_prompt(prompts, 3, begin=5) == (4, 5, 6)


def test_a_long_prompt_that_does_not_fit_is_left_out_and_said(pair: TablePair) -> None:
    found = benched(pair, Choice(baselines=()), prefill_tokens=64)
    assert found.measured.readings == []
    assert PLAIN not in found.measured.failed
    assert found.to_json()["prefill"] == []
    assert "no prompt of 64 tokens was read: the context is 64" in found.notes
    assert not any("reading" in grid.title for grid in grids(found))


def test_tables_tell_each_prompts_speed_up_and_where_rounds_time_goes(greedy: BenchReport) -> None:
    found = {grid.title: grid for grid in grids(greedy)}
    ups, rates = found["times forerun plain, by prompt"], found["tokens/s, by prompt"]
    assert list(rates.columns[2:]) == [engine.label for engine in greedy.shown]
    assert list(ups.columns[2:]) == [engine.label for engine in greedy.shown if not engine.is_plain]
    assert [row[:2] for row in ups.rows] == [["chat", "2"], ["code", "1"], ["all", "3"]]
    one = greedy.summaries["all", "forerun-model"].prompt_speed_ups[PLAIN]
    assert ups.rows[-1][2] == f"{one.median:.2f} / {one.lowest_decile:.2f} / {one.lowest:.2f}"
    split = found["where the time of a round goes"]
    assert len(split.rows) == len(greedy.categories) * len(greedy.shown)
    for told, (_, spent) in zip(split.rows, greedy.time_splits.items(), strict=True):
        assert told[3] == f"{sum(spent.seconds.values()) * 1e3:.2f}"
        assert sum(float(cell.partition(" ")[0]) for cell in told[4:8]) == pytest.approx(float(told[3]), abs=0.03)


def test_the_sweep_shows_each_fixed_length_but_no_bar(greedy: BenchReport) -> None:
    assert {(point.draft, point.draft_length) for point in greedy.sweep} == {("model", 2), ("ngram", 2)}
    assert {point.category for point in greedy.sweep} == {"chat", "code", "all"}
    assert not any(engine.swept for engine in greedy.shown)


def test_each_engine_has_a_process_and_its_memory(greedy: BenchReport) -> None:
    data = greedy.to_json()
    told = {one["name"]: one for one in data["engines"] if one["available"]}
    assert told.keys() == {PLAIN, "forerun-model", "forerun-ngram", "forerun-auto"}
    assert all(one["peak_bytes"] > 10**7 and not one["shares_process"] for one in told.values())


@pytest.mark.parametrize(("law", "status"), [("coupled", "equal"), ("auto", "not checkable")])
def test_sampled_output_is_checked_where_it_can_be(pair: TablePair, law: str, status: str) -> None:
    found = benched(pair, Choice(baselines=()), temperature=1.0, law=law)
    assert found.summaries["all", "forerun-model"].lossless.status == status
    assert found.to_json()["settings"]["law"] == ("block" if law == "auto" else law)


KEYS = {
    *("directory", "machine", "versions", "settings", "engines", "categories", "predictions", "sweep"),
    *("time_splits", "prefill"),
    *("failed", "lossless", "groups", "others_shares", "notes", "seconds"),
}
SUMMARY_KEYS = {
    *("engine", "prompts", "tokens", "tokens_per_s", "speed_ups", "first_token_s", "prefill_tokens_per_s"),
    "per_prompt",
    *(
        "token_s",
        "tokens_per_target_call",
        "acceptance_by_position",
        "mean_draft_length",
        "rounds_by_draft",
        "lossless",
    ),
}


def test_the_last_line_is_json_and_is_written_with_a_picture(
    pair: TablePair, prompt_file: Path, tmp_path: Path
) -> None:
    files = tmp_path / "found.json", tmp_path / "found.png"
    result = run(
        *(pair.path, "--prompts", prompt_file, "--baseline", "none", "--max-new-tokens", NEW_TOKENS),
        *("--json", files[0], "--plot", files[1], "--draft-length", 3, "--limit", 1),
    )
    assert result.exit_code == 0, result.output
    line = result.stdout.splitlines()[-1]
    assert files[0].read_text() == line + "\n"
    data = json.loads(line, parse_constant=pytest.fail)
    assert data.keys() == KEYS
    assert data["settings"]["prompts"] == 2
    assert [one["category"] for one in data["categories"]] == ["chat", "code", "all"]
    assert all(one.keys() == SUMMARY_KEYS for category in data["categories"] for one in category["engines"])
    drafted = next(one for one in data["categories"][-1]["engines"] if one["engine"] == "forerun-model")
    assert len(drafted["acceptance_by_position"]) == 3
    assert data["lossless"] is True
    assert all(said in result.stdout for said in ("tokens/s", "forerun plain (fp32)", "predicted", "2 of 2 equal"))
    PIL.Image.open(files[1]).verify()


def test_pictures_are_what_their_names_say(greedy: BenchReport, tmp_path: Path) -> None:
    for name in ("a.png", "a.svg", "a.html"):
        save_plot(greedy, tmp_path / name)
    width, height = PIL.Image.open(io.BytesIO((tmp_path / "a.png").read_bytes())).size
    assert min(width, height) > 500
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    page = (tmp_path / "a.html").read_text()
    seen: list[str] = []
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, attributes: seen.append(tag)  # type: ignore[method-assign]
    reader.feed(page)
    assert seen.count("table") == len(greedy.categories) + 6  # by prompt (two), reading, time, prediction, sweep
    assert "svg" in seen
    assert "src=" not in page


def test_what_cannot_be_had_is_told_with_the_reason(pair: TablePair) -> None:
    found = benched(pair, Choice())
    reasons = {engine.name: reason for engine, reason in found.failed.items()}
    assert set(BASELINES) <= reasons.keys()
    assert reasons["torch"] == "its checkpoint table is not here; give it with --checkpoint SRC"
    assert "--draft-checkpoint" in reasons["torch-assisted"]
    assert found.summaries["all", "forerun-model"].lossless.status == "equal"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ["--baseline", "torch,moon"],
            2,
            "unknown baseline 'moon'; known: torch, torch-assisted, optimum, onnxruntime-genai,",
        ),
        (["--against", "moon"], 2, "unknown baseline 'moon'"),
        (["--sweep", "1,9"], 2, "draft length 9: these engines were exported for 0 to 8"),
        (["--sweep", "few"], 2, "sweep 'few' is no list"),
        (["--draft-length", "9"], 2, "draft length 9"),
        (["--temperature", "nan"], 2, "temperature is nan"),
        (["--law", "magic"], 2, "unknown law 'magic'"),
        (["--max-new-tokens", "0"], 2, "max_new_tokens is 0"),
        (["--max-new-tokens", "64"], 2, "no prompt leaves room for 64 new tokens in a context of 64"),
        (["--prompts", "/no/such.jsonl"], 2, "cannot read the prompts /no/such.jsonl"),
        (["--plot", "a.pdf"], 2, "known endings: .png, .svg, .html"),
        (["--plot", "/no/folder/a.png"], 2, "cannot write /no/folder/a.png"),
        (["--json", "/no/folder/a.json"], 2, "cannot write /no/folder/a.json"),
    ],
)
def test_mistakes_are_one_line_before_any_work(
    pair: TablePair, prompt_file: Path, arguments: list[str], code: int, says: str
) -> None:
    given = arguments if "--prompts" in arguments else [*arguments, "--prompts", str(prompt_file)]
    result = run(pair.path, *given)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert says in result.stderr.splitlines()[-1]


def test_a_picture_without_matplotlib_names_what_to_install(
    pair: TablePair, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(pair.path, "--prompts", prompt_file, "--plot", tmp_path / "a.png")
    assert result.exit_code == 1
    assert "pip install 'forerun[bench]'" in result.stderr.splitlines()[-1]
