"""The command line: what it prints, and that every mistake is one clear line with nothing half-written."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from forerun import Controls, Decoder
from forerun.cli import main
from helpers.table_models import table_pair

STATS = {
    "rounds", "proposed", "accepted", "corrections", "bonuses", "truncated", "emitted", "acceptance_rate",
    "tokens_per_round", "accepted_by_position", "prefill_s", "decode_s", "tokens_per_s", "host_bytes_per_round",
    "law", "draft",
}  # fmt: skip


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def error_line(result: Result, code: int) -> str:
    """The one line of a mistake; the traceback and half of an output would be others."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    return lines[0]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return table_pair(tmp_path / "pair").path


def test_json_is_the_last_line_and_keeps_its_contract(pair: Path) -> None:
    result = run("generate", pair, "t1 t2", "--raw", "--json", "--max-new-tokens", 9)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert {"text", "token_ids", "prompt_tokens", "finish_reason", "stats"} <= found.keys()
    assert found["stats"].keys() >= STATS
    assert len(found["token_ids"]) == found["stats"]["emitted"] == 9
    assert found["finish_reason"] == "length"


def test_the_text_is_streamed_to_stdout_and_equals_that_of_json(pair: Path) -> None:
    arguments = ("generate", pair, "t1 t2", "--raw", "--max-new-tokens", 9)
    text = json.loads(run(*arguments, "--json").stdout)["text"]
    assert run(*arguments).stdout == text + "\n"


def test_plain_decoding_and_every_draft_length_give_the_same_text(pair: Path) -> None:
    arguments = ("generate", pair, "t1 t2", "--raw", "--max-new-tokens", 12)
    plain = run(*arguments, "--draft", "none").stdout
    assert [run(*arguments, "--draft-length", k).stdout for k in range(9)] == [plain] * 9


def test_the_prompt_may_come_from_a_file_or_from_stdin(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("t1 t2")
    direct = run("generate", pair, "t1 t2", "--raw").stdout
    assert run("generate", pair, "--prompt-file", tmp_path / "prompt.txt", "--raw").stdout == direct
    assert run("generate", pair, "--prompt-file", "-", "--raw", stdin="t1 t2").stdout == direct


def test_the_trace_shows_every_round_and_a_summary_on_stderr(pair: Path) -> None:
    arguments = ("generate", pair, "t1 t2", "--raw", "--max-new-tokens", 12, "--draft-length", 4)
    result = run(*arguments, "--trace")
    rounds = json.loads(run(*arguments, "--json").stdout)["stats"]["rounds"]
    lines = result.stderr.splitlines()
    assert all(word in lines[0] for word in ("accepted", "correction", "bonus", "rejected"))
    assert [int(line.split()[0]) for line in lines[1:-1]] == list(range(1, rounds + 1))
    assert lines[-1].startswith("12 tokens in")
    assert result.stdout == run(*arguments).stdout


def test_a_sampled_text_can_be_repeated_with_the_seed_that_was_told(pair: Path) -> None:
    arguments = ("generate", pair, "t1 t2", "--raw", "--temperature", 1, "--draft-length", 3, "--json")
    first = json.loads(run(*arguments).stdout)
    law = first["stats"]["law"]
    again = json.loads(run(*arguments, "--seed", first["seed"], "--law", law).stdout)
    assert again["token_ids"] == first["token_ids"]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--temperature", "nan", "temperature is nan"),
        ("--temperature", "-0.5", "temperature is -0.5"),
        ("--temperature", "inf", "temperature is inf"),
        ("--temperature", "warm", "--temperature"),
        ("--max-new-tokens", "0", "max_new_tokens is 0"),
        ("--max-new-tokens", "-3", "max_new_tokens is -3"),
        ("--seed", "-1", "seed is -1"),
        ("--seed", str(2**64), "seed is"),
        ("--stop", "", "stop"),
        ("--law", "magic", "'auto', 'residual', 'block', 'coupled', 'greedy'"),
        ("--draft", "crystal", "'auto', 'model', 'ngram', 'none'"),
        ("--draft-length", "many", "neither 'auto' nor a whole number"),
        ("--draft-length", "9", "at most 8"),
        ("--draft-length", "-1", "--draft-length"),
        ("--threads", "0", "--threads"),
        ("--prompt-file", "/no/such/file", "/no/such/file"),
        ("--no-such-option", "1", "--no-such-option"),
        ("--top-k", "-1", "top_k is -1"),
        ("--top-k", "some", "--top-k"),
        ("--top-p", "0", "top_p is 0.0; give a finite number above 0 up to 1"),
        ("--top-p", "1.5", "top_p is 1.5"),
        ("--min-p", "2", "min_p is 2.0"),
        ("--repetition-penalty", "0", "repetition_penalty is 0.0"),
        ("--repetition-penalty", "-1", "repetition_penalty is -1.0"),
        ("--presence-penalty", "nan", "presence_penalty is nan"),
        ("--frequency-penalty", "inf", "frequency_penalty is inf"),
        ("--no-repeat-ngram", "-2", "no_repeat_ngram is -2"),
        ("--logit-bias", "3", "'3' is not TOKEN=BIAS, as in 42=-1.5"),
        ("--logit-bias", "a=1", "'a=1' is not TOKEN=BIAS"),
        ("--logit-bias", "3=nan", "logit_bias of token 3 is nan"),
        ("--logit-bias", "8=1", "token 8 is not in the vocabulary of 8"),
        ("--bad-word", "", "bad_words"),
        ("--min-new-tokens", "999", "min_new_tokens is 999, above max_new_tokens"),
        ("--stop-token", "8", "stop_tokens: token 8 is not in the vocabulary of 8"),
        ("--stop-token", "w3", "--stop-token"),
        ("--logprobs", "21", "logprobs is 21"),
        ("--n", "0", "n is 0"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_known(pair: Path, option: str, value: str, says: str) -> None:
    prompt = [] if option == "--prompt-file" else ["t1"]
    assert says in error_line(run("generate", pair, *prompt, "--raw", option, value), 2)


def test_a_flag_that_this_model_cannot_honour_is_refused(pair: Path) -> None:
    line = error_line(run("generate", pair, "t1", "--raw", "--force-end"), 2)
    assert "force_end: this model has no end token" in line


def test_every_control_can_be_given(pair: Path) -> None:
    options = {
        "--max-new-tokens": 9,
        "--temperature": 1.5,
        "--top-k": 5,
        "--top-p": 0.9,
        "--min-p": 0.05,
        "--repetition-penalty": 1.2,
        "--presence-penalty": -0.5,
        "--frequency-penalty": 0.4,
        "--no-repeat-ngram": 3,
        "--min-new-tokens": 9,
        "--seed": 4,
        "--law": "residual",
        "--draft-length": 3,
        "--logprobs": 2,
    }
    several = ["--logit-bias", "1=2.5", "--logit-bias", "3=-inf", "--bad-word", "w1 w2", "--bad-word", "w4"]
    several += ["--stop-token", 6, "--stop-token", 7, "--stop", "w0 w0 w0"]
    result = run(
        "generate", pair, "w1 w2", "--raw", "--json", *(part for pair in options.items() for part in pair), *several
    )
    assert result.exit_code == 0, result.output
    with Decoder(pair) as decoder:
        expected = decoder.generate(
            "w1 w2",
            raw=True,
            max_new_tokens=9,
            temperature=1.5,
            top_k=5,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.2,
            presence_penalty=-0.5,
            frequency_penalty=0.4,
            no_repeat_ngram=3,
            min_new_tokens=9,
            seed=4,
            law="residual",
            draft_length=3,
            logprobs=2,
            logit_bias={1: 2.5, 3: -math.inf},
            bad_words=["w1 w2", "w4"],
            stop_tokens=[6, 7],
            stop=["w0 w0 w0"],
        )
    found = json.loads(result.stdout)
    assert found["token_ids"] == list(expected.token_ids)
    assert found["logprobs"] == expected.to_json()["logprobs"]


def test_an_option_for_every_control() -> None:
    command = main.commands["generate"]
    names = {parameter.name for parameter in command.params}
    assert {field.name for field in dataclasses.fields(Controls)} <= names


def test_log_probabilities_are_in_the_json_and_only_where_asked_for(pair: Path) -> None:
    arguments = ("generate", pair, "w1 w2", "--raw", "--json", "--max-new-tokens", 5)
    found = json.loads(run(*arguments, "--logprobs", 3).stdout, parse_constant=strict)
    assert [entry["token"] for entry in found["logprobs"]] == found["token_ids"]
    assert all(len(entry["top"]) == 3 and entry["top"][0][1] >= entry["logprob"] for entry in found["logprobs"])
    assert "logprobs" not in json.loads(run(*arguments).stdout)
    # What cannot come has no finite number, and JSON has no other.
    filtered = run(*arguments, "--logprobs", 20, "--temperature", 1, "--top-k", 2).stdout
    assert all(len(entry["top"]) == 2 for entry in json.loads(filtered, parse_constant=strict)["logprobs"])


def strict(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON")


def test_samples_are_shown_one_after_another_and_are_a_list_in_the_json(pair: Path) -> None:
    arguments = ("generate", pair, "w1 w2", "--raw", "--temperature", 1, "--seed", 3, "--max-new-tokens", 6, "--n", 3)
    samples = json.loads(run(*arguments, "--json").stdout)["samples"]
    assert len(samples) == 3
    lines = run(*arguments).stdout.splitlines()
    assert lines[0] == "--- sample 1 of 3, seed 3"
    assert lines[1::2] == [sample["text"] for sample in samples]
    assert [line.rpartition(" ")[2] for line in lines[::2]] == [str(sample["seed"]) for sample in samples]
    assert "leave out --trace or --n" in error_line(run(*arguments, "--trace"), 2)


def test_greedy_at_a_temperature_is_refused(pair: Path) -> None:
    assert "temperature 0" in error_line(run("generate", pair, "t1", "--raw", "--law", "greedy", "--temperature", 1), 2)


def test_the_prompt_is_given_exactly_once(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("t1")
    assert "give the prompt once" in error_line(run("generate", pair), 2)
    both = run("generate", pair, "t1", "--prompt-file", tmp_path / "prompt.txt")
    assert "give the prompt once" in error_line(both, 2)


def test_a_prompt_file_that_is_not_utf8_is_named(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"\xff\xfe\x00")
    line = error_line(run("generate", pair, "--prompt-file", tmp_path / "prompt.txt", "--raw"), 2)
    assert "prompt.txt is not UTF-8" in line


def test_prompts_that_no_row_can_hold_are_refused(pair: Path) -> None:
    assert "empty" in error_line(run("generate", pair, "", "--raw"), 2)
    assert "context of 64" in error_line(run("generate", pair, "t1 " * 64, "--raw"), 2)


def test_an_unknown_command_is_named() -> None:
    assert "'frobnicate'" in error_line(run("frobnicate"), 2)


def damaged(pair: Path, damage: str) -> None:
    manifest = json.loads((pair / "manifest.json").read_text())
    weights = pair / manifest["target"]["weights"]
    match damage:
        case "no directory":
            pair.rename(pair.with_name("elsewhere"))
        case "no manifest":
            (pair / "manifest.json").unlink()
        case "manifest is no JSON":
            (pair / "manifest.json").write_text("{")
        case "newer schema":
            (pair / "manifest.json").write_text(json.dumps({**manifest, "schema": 2, "new": 1}))
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "missing graph":
            (pair / manifest["draft"]["graph"]).unlink()
        case "other tokenizer of the draft":
            manifest["draft"]["vocabulary_sha256"] = "0" * 64
            (pair / "manifest.json").write_text(json.dumps(manifest))
        case "graph is no ONNX":
            graph = pair / manifest["target"]["graph"]
            graph.write_bytes(bytes(graph.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("no directory", "does not exist"),
        ("no manifest", "manifest.json"),
        ("manifest is no JSON", "not valid JSON"),
        ("newer schema", "schema 2"),
        ("truncated weights", "model.onnx.data is"),
        ("missing graph", "draft/model.onnx is missing"),
        ("other tokenizer of the draft", "another token map"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_a_damaged_engine_directory_is_refused_with_the_reason(
    pair: Path, command: str, damage: str, says: str
) -> None:
    damaged(pair, damage)
    arguments = ["t1", "--raw"] if command == "generate" else ["--verify"]
    result = run(command, pair, *arguments)
    assert result.exit_code == 1
    assert says in result.stderr
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_graph_that_cannot_be_loaded_is_named(pair: Path) -> None:
    damaged(pair, "graph is no ONNX")
    line = error_line(run("generate", pair, "t1", "--raw"), 1)
    assert "target/model.onnx: onnxruntime cannot load it" in line


def test_inspect_tells_what_a_directory_holds(pair: Path) -> None:
    result = run("inspect", pair, "--verify")
    assert result.exit_code == 0, result.stderr
    assert all(word in result.stdout for word in ("target", "draft", "limits", "verified", "residual"))
    found = json.loads(run("inspect", pair, "--json", "--verify").stdout)
    assert found["violations"] == []
    assert found["manifest"]["limits"]["draft_length"] == 8
    assert json.loads(run("inspect", pair, "--json").stdout)["violations"] is None


def test_inspect_finds_a_file_whose_hash_does_not_fit(pair: Path) -> None:
    weights = pair / json.loads((pair / "manifest.json").read_text())["target"]["weights"]
    changed = bytearray(weights.read_bytes())
    changed[0] ^= 1
    weights.write_bytes(changed)
    result = run("inspect", pair, "--verify")
    assert result.exit_code == 1
    assert "model.onnx.data has another SHA-256" in result.stderr


def test_a_mistake_answers_without_loading_an_engine(pair: Path) -> None:
    script = (
        "import sys; from forerun.cli import main\n"
        f"try: main(['generate', {str(pair)!r}, 't1', '--temperature', 'nan'])\n"
        "except SystemExit as exit: print(exit.code, 'onnxruntime' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["2", "False"]
