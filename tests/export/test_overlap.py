"""How much of a set of prompts stands in training texts: n-grams of words, counted where they stand."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from forerun.errors import ExportError
from forerun_export.bench.prompts import BenchPrompt
from forerun_export.overlap import WORDS, main, of_prompts, overlap, training_texts
from helpers.checkpoints import byte_tokenizer


def words(first: int, count: int) -> str:
    return " ".join(f"w{number}" for number in range(first, first + count))


def test_the_share_is_of_places_and_the_highest_of_a_prompt() -> None:
    prompts = [[words(0, 12)], [words(100, 9)], [words(200, 10)]]
    found = overlap(prompts, ["before " + words(100, 9) + " behind", words(0, WORDS), words(200, WORDS - 1)])
    assert (found.ngrams, found.shared) == (5 + 2 + 3, 1 + 2)
    assert found.share == pytest.approx(0.3)
    assert (found.highest, found.prompt) == (1.0, 1)
    assert found.training_words == 11 + WORDS + WORDS - 1


def test_a_repeated_ngram_counts_as_often_as_it_stands_there() -> None:
    prompt = " ".join(["same"] * (WORDS + 4))
    assert (overlap([[prompt]], [" ".join(["same"] * WORDS)]).shared, overlap([[prompt]], []).shared) == (5, 0)


def test_case_and_what_stands_between_words_do_not_matter() -> None:
    found = overlap([["One, two; three (four) FIVE six-seven eight!"]], ["one two three\nfour five six seven eight"])
    assert found.share == 1.0


def test_a_short_text_counts_as_a_whole() -> None:
    assert overlap([["tell a joke"]], ["Please tell a joke now."]).share == 1.0
    assert overlap([["tell a joke"]], ["Please tell a story now."]).share == 0.0


def test_no_ngram_goes_over_the_end_of_a_text() -> None:
    halves = [words(0, WORDS // 2), words(WORDS // 2, WORDS // 2)]
    assert overlap([[words(0, WORDS)]], halves).shared == 0
    assert overlap([halves], [words(0, WORDS)]).ngrams == 2


def test_nothing_shared_names_no_prompt() -> None:
    found = overlap([[words(0, 9)], [""]], [words(50, 90)])
    assert (found.share, found.highest, found.prompt) == (0.0, 0.0, None)
    assert overlap([], []).share == 0.0


@pytest.mark.parametrize("copied", ["question", "earlier", "begun"])
def test_every_turn_of_a_conversation_and_the_begun_answer_count(copied: str) -> None:
    texts = {"question": words(0, 8), "earlier": words(100, 8), "begun": words(200, 8)}
    prompt = BenchPrompt("a", texts["question"], texts["begun"], (("assistant", texts["earlier"]),))
    assert of_prompts([prompt], [texts[copied]]).share == pytest.approx(1 / 3)


def work_folder(path: Path, prompt: str, answer: str) -> Path:
    tokenizer = byte_tokenizer()
    (path / "engine").mkdir(parents=True)
    tokenizer.save(str(path / "engine" / "tokenizer.json"))
    ids = [[1, *tokenizer.encode(text).ids] for text in (prompt, answer)]
    entry = {"number": 0, "kind": "chat", "temperature": 0.0, "prompt": ids[0], "answer": ids[1]}
    (path / "answers.jsonl").write_text(json.dumps(entry) + "\n")
    return path


def test_a_trainings_prompts_and_answers_are_read_from_its_work_folder(tmp_path: Path) -> None:
    work = work_folder(tmp_path / "head.work", "what is it? ", words(0, 12))
    assert list(training_texts(str(work))) == [f"what is it? {words(0, 12)}"]
    answers = work / "answers.jsonl"
    whole = answers.read_bytes()
    answers.write_bytes(whole + whole[:20])  # a training that runs is writing the next one
    assert len(list(training_texts(str(work)))) == 1
    assert answers.read_bytes() == whole + whole[:20]
    answers.write_text('{"number": 3}\n')
    with pytest.raises(ExportError, match=r"answers\.jsonl holds no answers \(KeyError"):
        list(training_texts(str(work)))
    (work / "engine" / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match="give the work folder of a training"):
        list(training_texts(str(work)))


def test_the_command_tells_of_each_set_what_stands_in_all_training_texts(tmp_path: Path) -> None:
    work_folder(tmp_path / "head.work", "what? ", words(0, 12))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(words(50, 20))
    (tmp_path / "trained.jsonl").write_text(json.dumps({"prompt": words(90, 9)}))
    for name, numbers in (("copied", (2, 55, 90)), ("new", (300, 400, 500))):
        lines = [json.dumps({"prompt": words(number, 9)}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    names = [str(tmp_path / f"{name}.jsonl") for name in ("copied", "new")]
    training = [part for place in ("head.work", "texts", "trained.jsonl") for part in ("--training", tmp_path / place)]
    result = CliRunner().invoke(main, [*names, *map(str, training), "--json"])
    assert result.exit_code == 0, result.output
    assert [one["share"] for one in json.loads(result.stdout).values()] == [1.0, 0.0]
    said = CliRunner().invoke(main, [*names, *map(str, training)]).stdout.splitlines()
    assert "100.00% of the 6 n-grams of 8 words" in said[0]
    assert "0.00% of the 6 n-grams of 8 words" in said[1]


def test_a_place_without_texts_is_one_line() -> None:
    result = CliRunner().invoke(main, ["chat", "--training", "no/such/place"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: no/such/place is no prompt file")
    assert result.stderr.count("\n") == 1


def test_our_own_sets_share_nothing() -> None:
    texts = list(training_texts("default"))
    found = of_prompts([BenchPrompt("a", text) for text in training_texts("chat")], texts)
    assert found.shared == 0
    assert of_prompts([BenchPrompt("a", text) for text in texts], texts).share == 1.0
