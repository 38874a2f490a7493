"""`forerun train-head`: prompts, answers, what is refused, and all of it on a tiny target."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forerun.cli import main
from forerun.decoder import Decoder
from forerun.errors import ExportError, RequestError
from forerun.tokenizer import Tokenizer
from forerun_export.bench.prompts import BenchPrompt, read_prompts
from forerun_export.heads.answers import read_answers
from forerun_export.heads.command import command_line
from forerun_export.heads.folder import read_head, write_head
from forerun_export.heads.json_lines import append_line
from forerun_export.heads.passages import passages, read_texts
from forerun_export.heads.pipeline import Options, train_head
from forerun_export.heads.prompts import code_prompts, interleaved, is_question, opening
from forerun_export.heads.training import Progress, Schedule
from forerun_export.progress import silent
from helpers.checkpoints import tiny_llama
from helpers.small_tokenizers import byte_level
from helpers.traced_checkpoints import tiny


def _nothing(*_: Any) -> None:
    """Watches nothing."""


def _never(*_: Any) -> None:
    pytest.fail("trained again")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    folder = tmp_path_factory.mktemp("train_head")
    prompts = folder / "asked.jsonl"
    lines = [{"prompt": f"Question {number}", "category": ("chat", "code body")[number % 2]} for number in range(12)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "notes").mkdir()
    (folder / "notes" / "long.md").write_text("A sentence to learn from. " * 40)
    return Options(
        target=str(tiny_llama(folder / "target")),
        out=folder / "head",
        work=folder / "work",
        prompts=[str(prompts)],
        text=[str(folder / "notes")],
        passages=3,
        max_new_tokens=8,
        context=256,
        answer_batch=4,
        vocabulary=100,
        epochs=2,
    )


def test_a_head_is_trained_and_a_second_run_does_nothing_again(options: Options) -> None:
    result = train_head(options, report=silent, watch=_nothing)
    head, answers = read_head(options.out), (options.work / "answers.jsonl").read_bytes()
    assert len(head.tokens) == 100
    assert head.record.figures == dict(result.drafts["head"])
    assert {"head", "layers:0", "n-gram"} == set(result.drafts)
    card = (options.out / "README.md").read_text()
    assert card.startswith(f"# Draft head for {Path(options.target).name}\n")
    assert "| n-gram |" in card
    assert "to the prompts of asked.jsonl.\n  And 3 passages of notes. " in card
    again = train_head(options, report=silent, watch=_never)
    assert again.trained.steps == result.trained.steps
    assert (options.work / "answers.jsonl").read_bytes() == answers
    for name, array in read_head(options.out).tensors.items():
        assert (array == head.tensors[name]).all(), name


def test_a_head_is_trained_further_from_another_and_its_card_tells_both_commands(
    options: Options, tmp_path: Path
) -> None:
    train_head(replace(options, command="forerun train-head first"), report=silent, watch=_nothing)
    further = replace(
        options,
        start=options.out,
        out=tmp_path / "head",
        work=tmp_path / "work",
        learning_rate=0.0,
        command="forerun train-head further",
    )
    result = train_head(further, report=silent, watch=_nothing)
    first, second = read_head(options.out), read_head(further.out)
    for name in set(first.tensors) - {"tokens"}:  # at a learning rate of 0 a head ends as it began
        assert (first.tensors[name] == second.tensors[name]).all(), name
    assert second.record.training is not None
    assert second.record.training.start == first.record.training
    card = (further.out / "README.md").read_text()
    assert "    forerun train-head first\n\nand from that head on by\n\n    forerun train-head further\n" in card
    steps = sum(run.steps for run in second.record.training.runs)
    assert steps == result.trained.best.step + first.record.training.steps  # type: ignore[union-attr]
    assert f"**Training**: {steps} steps" in card
    assert "**Data**, of the last training: " in card


def test_a_training_that_goes_on_watches_only_what_no_training_has_learnt(options: Options, tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps({"prompt": "Complete this.", "category": "code copying"}) + "\n")
    apart = replace(options, held_out=[str(held_out)], out=tmp_path / "head", work=tmp_path / "work")
    kinds: list[set[str]] = []

    def watch(progress: Progress, _: Schedule) -> None:
        kinds.append(set(progress.figures))

    first = train_head(replace(apart, epochs=1), report=silent, watch=watch)
    assert "code copying" not in kinds[0]  # of the prompts to train on
    train_head(replace(apart, start=first.path, work=tmp_path / "further", epochs=1), report=silent, watch=watch)
    assert kinds[-1] == {"code copying"}


def test_a_training_that_goes_on_does_not_take_up_the_one_that_it_goes_on_from(
    options: Options, tmp_path: Path
) -> None:
    """Both keep their state in the same folder unless told otherwise."""
    first = train_head(replace(options, work=tmp_path), report=silent, watch=_nothing)
    further = replace(options, work=tmp_path, start=first.path, out=tmp_path / "head")
    with pytest.raises(ExportError, match=r"checkpoint.pt is of a training with other options"):
        train_head(further, report=silent, watch=_nothing)
    assert not (tmp_path / "head").exists()


def test_a_head_for_other_tokens_or_layers_is_no_start(options: Options, tmp_path: Path) -> None:
    train_head(options, report=silent, watch=_nothing)
    record, started = read_head(options.out).record, replace(options, start=tmp_path / "other", work=tmp_path / "work")
    faults = {
        "was trained for other tokens than the target's": replace(
            record, target=replace(record.target, vocabulary_sha256="0" * 64)
        ),
        "reads layers 1, 2, 4, and one for this target 1, 2, 3": replace(record, feature_layers=(1, 2, 4)),
    }
    for message, other in faults.items():
        write_head(tmp_path / "other", other, read_head(options.out).tensors, "")
        with pytest.raises(ExportError, match=message):
            train_head(started, report=silent, watch=_nothing)


def test_half_of_the_answers_are_greedy_and_each_kind_has_both(options: Options) -> None:
    train_head(options, report=silent, watch=_nothing)
    answers = read_answers(options.work / "answers.jsonl")
    assert len(answers) == 12
    both = {(one.kind, one.temperature) for one in answers}
    assert both == {(kind, temperature) for kind in ("chat", "code body") for temperature in (0.0, 1.0)}


def test_a_line_that_a_killed_run_left_half_written_is_dropped(tmp_path: Path) -> None:
    entry = {"number": 3, "kind": "chat", "temperature": 0.0, "prompt": [1, 2], "answer": [3]}
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(entry) + "\n" + json.dumps(entry)[:20])
    assert [one.number for one in read_answers(path)] == [3]
    append_line(path, entry | {"number": 4, "kind": "ends of lines: \u2028 \x85 \u2029"})
    assert [one.number for one in read_answers(path)] == [3, 4]
    path.write_text('{"number": 3}\n')
    with pytest.raises(ExportError, match="holds no answers"):
        read_answers(path)
    path.write_text("{]\n")
    with pytest.raises(ExportError, match=r"answers.jsonl is damaged .*; remove it"):
        read_answers(path)


def test_other_prompts_get_answers_of_their_own(options: Options, tmp_path: Path) -> None:
    """A prompt that is held out now shifts the numbers of those behind it, and is learnt no more."""
    changed = replace(options, work=tmp_path / "work", out=tmp_path / "head", epochs=1)
    train_head(changed, report=silent, watch=_nothing)
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(Path(options.prompts[0]).read_text().splitlines()[2] + "\n")
    (changed.work / "checkpoint.pt").unlink()
    result = train_head(replace(changed, held_out=[str(held_out)]), report=silent, watch=_nothing)
    last = {one.number: one.prompt for one in read_answers(changed.work / "answers.jsonl")}
    prompts = [prompt for number, prompt in enumerate(read_prompts(options.prompts)) if number != 2]
    with Decoder(changed.work / "engine", load_draft=False) as decoder:
        assert [last[number] for number in range(11)] == [prompt.tokens(decoder.tokenizer) for prompt in prompts]
    assert result.data.answers == 11 - 2
    (overlap,) = result.data.overlaps  # as it is learnt no more
    assert overlap.startswith("held-out.jsonl: 0.00% of the 1 n-grams of 8 words stand in the training texts (")
    assert f"* {overlap}\n" in (changed.out / "README.md").read_text()


def test_what_of_the_held_out_prompts_is_learnt_is_told(options: Options, tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    prompts = ["A sentence to learn from. A sentence to learn", "None of this stands in any text that is read"]
    held_out.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    apart = replace(options, held_out=[str(held_out)], out=tmp_path / "head", work=tmp_path / "work", epochs=1)
    (told,) = train_head(apart, report=silent, watch=_nothing).data.overlaps
    assert told.startswith("held-out.jsonl: 40.00% of the 5 n-grams of 8 words")
    assert told.endswith("the prompt with most, number 1, 100.0%")


@pytest.mark.parametrize("change", [{"seed": 7}, {"max_new_tokens": 9}, {"answer_precision": "int8"}, {"target": ""}])
def test_a_work_folder_of_other_answers_is_refused(options: Options, tmp_path: Path, change: dict[str, Any]) -> None:
    train_head(options, report=silent, watch=_nothing)
    if "target" in change:
        change = {"target": str(tiny_llama(tmp_path / "target", seed=5))}
    with pytest.raises(ExportError, match=r"is of a training with .*; give another --work, or remove it"):
        train_head(replace(options, **change), report=silent, watch=_never)


def test_a_folder_of_something_else_is_no_work_folder(options: Options, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(ExportError, match=r"it holds thesis\.tex; give another --work"):
        train_head(replace(options, work=tmp_path), report=silent, watch=_never)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_prompts_that_are_too_long_are_told_of(options: Options, tmp_path: Path) -> None:
    prompts = tmp_path / "some.jsonl"
    prompts.write_text(Path(options.prompts[0]).read_text() + json.dumps({"prompt": "word " * 300}) + "\n")
    told: list[str] = []
    short = replace(options, prompts=[str(prompts)], work=tmp_path / "work", out=tmp_path / "head", epochs=1)
    train_head(short, report=lambda step, *_: told.append(step), watch=_nothing)
    assert "leaving out 1 prompts that are too long for --context" in told
    with pytest.raises(ExportError, match="no prompt leaves room for 250 tokens in a context of 256; lower"):
        train_head(replace(options, work=tmp_path / "other", max_new_tokens=250), report=silent, watch=_never)


def test_too_little_to_learn_from_is_told_of(options: Options, tmp_path: Path) -> None:
    """Passages are no answers: candidates and what is watched come from these."""
    (tmp_path / "short.txt").write_text("Too short.")
    short = replace(options, text=[str(tmp_path / "short.txt")], work=tmp_path / "work", out=tmp_path / "head")
    with pytest.raises(ExportError, match="no text of --text has 32 tokens; give longer ones"):
        train_head(short, report=silent, watch=_never)
    (tmp_path / "two.jsonl").write_text("".join(Path(options.prompts[0]).read_text().splitlines(True)[:2]))
    few = replace(options, prompts=[str(tmp_path / "two.jsonl")], work=tmp_path / "work", out=tmp_path / "head")
    with pytest.raises(ExportError, match="too few answers to train on and to hold out; give more prompts"):
        train_head(few, report=silent, watch=_never)


def test_a_target_whose_logits_no_head_can_make_is_refused_before_any_work(options: Options, tmp_path: Path) -> None:
    capped = replace(options, target=str(tiny(tmp_path / "gemma2", "gemma2")), work=tmp_path / "work")
    with pytest.raises(ExportError, match="a gemma2 makes its logits in another way"):
        train_head(capped, report=silent, watch=_never)
    assert not capped.work.exists()


REFUSED = {
    "nothing to train on": ({"prompts": ()}, ExportError, "nothing to train on; give --prompts FILE"),
    "no such prompts": ({"prompts": ("missing.jsonl",)}, RequestError, "cannot read the prompts missing.jsonl"),
    "no such text": ({"text": ("missing.txt",)}, ExportError, r"missing.txt cannot be read \(No such file"),
    "no such start": ({"start": Path("missing-head")}, ExportError, "missing-head holds no draft head: "),
    "no such device": ({"device": "gpu"}, ExportError, "--device gpu: no such device; use auto, cpu or cuda"),
    "no device to train on": ({"device": "meta"}, ExportError, "--device meta: heads train on cpu or cuda"),
    "no such GPU": ({"device": "cuda:99"}, ExportError, "--device cuda:99: PyTorch sees no such GPU here; use cpu"),
    "a file as folder": ({"out": Path(__file__)}, ExportError, "test_train_head.py is a file; give a folder"),
    "a file above": ({"out": Path(__file__) / "head"}, ExportError, "test_train_head.py is a file; give a folder"),
    "more code than there is": ({"code_prompts": 10**6}, ExportError, "ask for no more --code-prompts"),
    "no such target": ({"target": "missing.gguf"}, ExportError, "missing.gguf does not exist"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_trained_is_refused_before_any_work(options: Options, tmp_path: Path, fault: str) -> None:
    changes, error, message = REFUSED[fault]
    with pytest.raises(error, match=message):
        train_head(replace(options, work=tmp_path / "work", **changes), report=silent, watch=_nothing)  # type: ignore[arg-type]
    assert not (tmp_path / "work" / "engine").exists()


def test_the_command_line_says_so_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["train-head", "missing.gguf", "--out", str(tmp_path / "head")])
    assert result.exit_code == 1
    assert "missing.gguf does not exist" in result.output


def test_the_card_tells_options_that_were_given_and_no_folders(tmp_path: Path) -> None:
    given = {"out": tmp_path / "my-head", "prompts": (str(tmp_path / "a.jsonl"), "b.txt"), "seed": 3, "epochs": 4}
    given["start"] = tmp_path / "earlier"
    assert command_line("owner/model", given) == (
        "forerun train-head owner/model --out my-head --prompts a.jsonl --prompts b.txt --seed 3 --start earlier"
    )


def test_code_prompts_are_chosen_by_seed_and_begin_every_other_answer(tmp_path: Path) -> None:
    sentence = "Gives a number that is larger by one than the number that was given, whatever that was."
    functions = [f'def f{number}(x):\n    """{sentence}"""\n    return x + 1\n' for number in range(20)]
    untold = "def untold(x):\n    return x\n"
    (tmp_path / "library.py").write_text("\n\n".join([*functions, untold]))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.py").write_text(functions[0].replace("f0", "of_a_test"))
    prompts = code_prompts(6, seed=1, folder=tmp_path)
    assert prompts == code_prompts(9, seed=1, folder=tmp_path)[:6]
    assert prompts != code_prompts(6, seed=2, folder=tmp_path)
    assert [bool(prompt.begun) for prompt in prompts] == [False, True] * 3
    everything = code_prompts(99, seed=1, folder=tmp_path)
    assert len(everything) == 20
    (tmp_path / "feeds.py").write_text("x = 1\n\x0c\n" + functions[0].replace("f0", "after_a_form_feed"))
    more = code_prompts(99, seed=1, folder=tmp_path)
    assert len(more) == 21
    assert any("def after_a_form_feed(x):\n" in prompt.text + prompt.begun for prompt in more)
    assert all("return" not in prompt.text for prompt in everything)
    assert all(prompt.begun.endswith(f'{sentence}"""\n') for prompt in everything if prompt.begun)


class TestPassages:
    """Plain text to learn from."""

    TOKENIZER = Tokenizer(byte_level(), end_tokens=())

    def _passages(self, *texts: str, limit: int = 99, seed: int = 0) -> list[tuple[int, ...]]:
        found = passages(texts, self.TOKENIZER, limit=limit, seed=seed)
        assert [one.number for one in found] == list(range(len(found)))
        return [one.prompt + one.answer for one in found]

    def test_a_text_is_cut_into_pieces_and_a_short_rest_is_left_out(self) -> None:
        text = "abcdefgh" * 70  # 560 bytes, a token each
        pieces = self._passages(text)
        assert [len(piece) for piece in pieces] == [256, 256, 48]
        assert sum(pieces, ()) == tuple(self.TOKENIZER.encode(text, add_special_tokens=False))
        assert [len(piece) for piece in self._passages(text[:520], "short")] == [256, 256]

    def test_the_seed_draws_some_of_more_than_are_wanted(self) -> None:
        texts = [chr(ord("a") + number) * 40 for number in range(20)]
        some = self._passages(*texts, limit=5, seed=1)
        assert len(set(some)) == 5
        assert some == self._passages(*texts, limit=5, seed=1)
        assert some != self._passages(*texts, limit=5, seed=2)

    def test_folders_are_read_whole_but_for_what_is_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "inner").mkdir()
        for name in ("b.txt", "inner/a.py", "image.png", "empty.md"):
            (tmp_path / name).write_text("" if name == "empty.md" else name)
        assert read_texts([str(tmp_path), str(tmp_path / "image.png")]) == ["b.txt", "inner/a.py", "image.png"]

    def test_a_path_without_text_is_refused(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "none.txt"):
            (tmp_path / "none.txt").write_text(" \n")
            with pytest.raises(ExportError, match=f"{path} holds no text"):
                read_texts([str(path)])


def test_prompts_of_all_lists_come_in_turn() -> None:
    one, two = (
        [BenchPrompt("chat", f"{name}{number}") for number in range(count)] for name, count in (("a", 3), ("b", 1))
    )
    assert [prompt.text for prompt in interleaved(one, two)] == ["a0", "b0", "a1", "a2"]


def test_an_opening_ends_where_the_user_begins() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
    assert opening(template, None, bos_token=None, eos_token=None) == "<user>"
    assert opening(template, "Be kind.", bos_token=None, eos_token=None) == "<system>Be kind.</><user>"


@pytest.mark.parametrize(
    ("text", "counts"),
    [("What is a prime number?", True), ("", False), ("Hi there", False), ("\N{FULL MOON SYMBOL} " * 8, False)],
)
def test_questions_have_words(text: str, counts: bool) -> None:
    assert is_question(text) == counts
