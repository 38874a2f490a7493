"""`forerun bench` on lookup-table engines, each in a process of its own: what it reports, also when one fails."""

import io
import json
import os
import signal
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import PIL.Image
import pytest
from click.testing import CliRunner, Result

from forerun.cli import main
from forerun.directory import EngineDirectory
from forerun_export.bench import BenchReport, Choice, Settings, bench
from forerun_export.bench.engines import BASELINES, PLAIN, line_up
from forerun_export.bench.measuring import Measured, TokenPrompt, measure
from forerun_export.bench.plot import save_plot
from forerun_export.bench.processes import Worker, WorkerSpec, waves
from forerun_export.bench.prompts import BenchPrompt
from forerun_export.bench.runs import Output, Task
from helpers.table_models import TablePair, table_pair

PROMPTS = [BenchPrompt("chat", "w1 w2"), BenchPrompt("chat", "w3"), BenchPrompt("code", "w4 w5 w6")]
NEW_TOKENS = 12


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
    return benched(pair, Choice(baselines=(), draft_length=3, sweep=(0, 2)), repeats=2)


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
    *("failed", "lossless", "groups", "others_shares", "notes", "seconds"),
}
SUMMARY_KEYS = {
    *("engine", "prompts", "tokens", "tokens_per_s", "speed_ups", "first_token_s", "prefill_tokens_per_s"),
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
    assert seen.count("table") == len(greedy.categories) + 2
    assert "svg" in seen
    assert "src=" not in page


def test_what_cannot_be_had_is_told_with_the_reason(pair: TablePair) -> None:
    found = benched(pair, Choice())
    reasons = {engine.name: reason for engine, reason in found.failed.items()}
    assert set(BASELINES) <= reasons.keys()
    assert reasons["torch"] == "its checkpoint table is not here; give it with --checkpoint SRC"
    assert "--draft-checkpoint" in reasons["torch-assisted"]
    assert found.summaries["all", "forerun-model"].lossless.status == "equal"


def killed_at(worker_name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a worker's process before it is asked for the task of this number."""
    decode, asked = Worker.decode, [0]

    def watched(self: Worker, task: Task) -> Output:
        if self.spec.name == worker_name:
            asked[0] += 1
            if asked[0] == number:
                os.kill(self.process.pid, signal.SIGKILL)
                self.process.wait()
        return decode(self, task)

    monkeypatch.setattr(Worker, "decode", watched)


def test_a_worker_that_dies_is_told_and_the_rest_is_kept(pair: TablePair, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at("forerun-model", 4, monkeypatch)  # the first task is the warm-up
    found = benched(pair, Choice(baselines=()))
    reason = next(reason for engine, reason in found.failed.items() if engine.name == "forerun-model")
    assert reason.startswith("after 2 runs: its process was killed (signal 9)")
    assert len(found.measured.of("forerun-model")) == 2
    assert len(found.measured.of(PLAIN)) == len(PROMPTS)
    assert found.summaries["all", "forerun-model"].prompts == 2
    json.dumps(found.to_json(), allow_nan=False)


def test_a_worker_that_ends_by_itself_says_its_last_words() -> None:
    spec = WorkerSpec("broken", "forerun", {"directory": "x", "threads": 1, "load_draft": 3})
    with Worker(spec, threads=1) as worker:
        assert worker.process.stdin is not None
        worker.process.stdin.write("this is no question\n")
        with pytest.raises(Exception, match=r"its process ended with code 1 \(json.*JSONDecodeError"):
            worker.load()


def test_a_directory_that_cannot_be_opened_is_an_error_of_its_engines(tmp_path: Path) -> None:
    spec = WorkerSpec("broken", "forerun", {"directory": str(tmp_path), "threads": 1, "load_draft": True})
    with Worker(spec, threads=1) as worker, pytest.raises(Exception, match=r"manifest\.json"):
        worker.load()


def test_no_process_is_left(pair: TablePair) -> None:
    spec = WorkerSpec(PLAIN, "forerun", {"directory": str(pair.path), "threads": 1, "load_draft": False})
    with Worker(spec, threads=1) as worker:
        worker.load()
        worker.decode(Task(tokens=(1, 2), max_new_tokens=3))
    assert worker.process.returncode == 0


def test_engines_take_turns_and_each_begins_once_in_a_while(pair: TablePair, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    decode = Worker.decode

    def watched(self: Worker, task: Task) -> Output:
        order.append(self.spec.name)
        return decode(self, task)

    monkeypatch.setattr(Worker, "decode", watched)
    benched(pair, Choice(baselines=()))
    measured = order[-4 * len(PROMPTS) :]  # behind the warm-up
    turns = [measured[start : start + 4] for start in range(0, len(measured), 4)]
    assert all(sorted(turn) == sorted(turns[0]) for turn in turns)
    assert len({turn[0] for turn in turns}) > 1


def sized(*sizes: int) -> list[WorkerSpec]:
    return [WorkerSpec(str(number), "forerun", {}, size) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "available", "expected"),
    [
        ((3, 4, 5), None, [["0", "1", "2"]]),
        ((3, 4, 5), 12, [["0", "1", "2"]]),
        ((3, 4, 5), 8, [["0", "1"], ["2"]]),
        ((3, 9, 2), 8, [["0", "2"], ["1"]]),
    ],
)
def test_workers_that_do_not_fit_together_wait(
    sizes: Sequence[int], available: int | None, expected: list[list[str]]
) -> None:
    assert [[spec.name for spec in group] for group in waves(sized(*sizes), available)] == expected


def test_groups_give_the_same_runs_one_after_the_other(pair: TablePair) -> None:
    line = line_up(EngineDirectory.open(pair.path), Choice(baselines=()), threads=1, available_bytes=None)
    prompts = [TokenPrompt("a", (1, 2)), TokenPrompt("a", (3,))]
    settings = Settings(max_new_tokens=NEW_TOKENS)
    together, apart = (measure(line, prompts, settings, available_bytes=free) for free in (None, 10**9))
    assert together.groups == 1 < apart.groups

    def said(measured: Measured) -> set[tuple[str, int, tuple[int, ...]]]:
        return {(run.engine, run.prompt, run.output.tokens) for run in measured.runs}

    assert said(together) == said(apart)


def test_forerun_shares_a_process_where_memory_is_short(pair: TablePair) -> None:
    directory = EngineDirectory.open(pair.path)
    line = line_up(directory, Choice(baselines=()), threads=1, available_bytes=10**9)
    assert len(line.workers) == 1
    assert line.workers[0].arguments["load_draft"] is True
    assert {engine.worker for engine in line.engines} == {line.workers[0].name}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--baseline", "torch,moon"], 2, "unknown baseline 'moon'; known: torch, torch-assisted, optimum, none"),
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
