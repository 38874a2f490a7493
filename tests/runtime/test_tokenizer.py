import hashlib
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, processors

from forerun.errors import EngineError, RequestError
from forerun.tokenizer import Tokenizer, render_chat, vocabulary_sha256
from helpers.small_tokenizers import byte_level, lookup_words

QUESTION = [{"role": "user", "content": "one"}]


def with_bos() -> tokenizers.Tokenizer:
    tokenizer = lookup_words(["<unk>", "<s>", "</s>", "one", "two"])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def saved(folder: Path, tokenizer: tokenizers.Tokenizer, template: str | None = None) -> Tokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_bytes(template.encode())
    return Tokenizer.open(folder, end_tokens=[2], bos_token="<s>", eos_token="</s>")


def test_raw_text_gets_the_special_tokens_of_the_post_processor(tmp_path: Path) -> None:
    assert saved(tmp_path, with_bos()).encode("one two") == [1, 3, 4]


def test_a_conversation_gets_the_special_tokens_of_its_template_only(tmp_path: Path) -> None:
    template = "{{ bos_token }} {{ messages[0].content }} {{ eos_token }}{% if add_generation_prompt %} two{% endif %}"
    assert saved(tmp_path, with_bos(), template).chat(QUESTION) == [1, 3, 2, 4]


def test_what_was_saved_is_what_is_opened(tmp_path: Path) -> None:
    opened = saved(tmp_path, with_bos(), "{{ 1 }}")
    assert (opened.size, opened.end_tokens, opened.has_chat_template) == (5, frozenset({2}), True)
    assert opened.vocabulary_sha256() == vocabulary_sha256(with_bos())


def test_truncation_and_padding_left_from_training_touch_no_prompt(tmp_path: Path) -> None:
    trained = with_bos()
    trained.enable_truncation(2)
    trained.enable_padding(length=8)
    assert saved(tmp_path, trained).encode("one two one") == [1, 3, 4, 3]


def test_decode_skips_special_tokens_unless_asked(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, with_bos())
    assert tokenizer.decode([1, 3, 2]) == "one"
    assert tokenizer.decode([1, 3, 2], skip_special=False) == "<s> one </s>"


def test_a_prompt_without_template_says_to_pass_it_raw(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, with_bos())
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template.*--raw.*raw=True"):
        tokenizer.chat(QUESTION)


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"model": 3}', b"\xff\xfe"])
def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(EngineError, match=r"tokenizer\.json is (missing|damaged).*export"):
        Tokenizer.open(tmp_path, end_tokens=[], bos_token=None, eos_token=None)


def test_a_damaged_template_is_named(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, with_bos(), "a\n{% if %}")
    with pytest.raises(EngineError, match=r"chat_template\.jinja cannot be read \(line 2"):
        tokenizer.chat(QUESTION)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(EngineError, match=r"chat_template\.jinja is damaged"):
        Tokenizer.open(tmp_path, end_tokens=[], bos_token=None, eos_token=None)


def test_half_a_character_in_a_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="character 3"):
        saved(tmp_path, with_bos(), "{{ messages[0].content }}").encode("one\udcff")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("[{{ bos_token }}{{ eos_token }}]", "[]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "one"),
        ("a\r\nb", "a\nb"),
    ],
)
def test_templates_find_what_hugging_face_gives_them(template: str, text: str) -> None:
    assert render_chat(template, QUESTION) == text


def test_templates_can_print_the_date() -> None:
    before, now, after = datetime.now(), render_chat("{{ strftime_now('%Y-%m-%d') }}", []), datetime.now()
    assert before.strftime("%Y-%m-%d") <= now <= after.strftime("%Y-%m-%d")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ 'a' + 1 }}", "can only concatenate"),
        ("{{ messages.append(1) }}", "not safe|immutable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
    ],
)
def test_a_template_that_fails_gives_its_reason_in_one_line(template: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        render_chat(template, QUESTION)
    assert "\n" not in str(caught.value)


def vocabulary(**tokens: int) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel(tokens, unk_token="a"))


def test_the_vocabulary_hash_ignores_the_order_of_the_map() -> None:
    assert vocabulary_sha256(vocabulary(a=0, b=1)) == vocabulary_sha256(vocabulary(b=1, a=0))


@pytest.mark.parametrize(
    "other", [{"a": 1, "b": 0}, {"a": 0, "c": 1}, {"a": 0}, {"a": 0, "b": 2}, {"a": 0, "b": 1, "c": 2}]
)
def test_the_vocabulary_hash_sees_every_other_map(other: dict[str, int]) -> None:
    assert vocabulary_sha256(vocabulary(a=0, b=1)) != vocabulary_sha256(vocabulary(**other))


def test_the_vocabulary_hash_sees_added_tokens() -> None:
    more = byte_level()
    more.add_tokens(["another"])
    assert vocabulary_sha256(byte_level()) != vocabulary_sha256(more)


def test_the_vocabulary_hash_is_the_same_forever() -> None:
    # Manifests hold it: another way of hashing needs a new schema version.
    assert vocabulary_sha256(vocabulary(a=0, b=1)) == hashlib.sha256(b"0 1 a1 1 b").hexdigest()


def test_raw_prompts_pay_for_no_template_engine() -> None:
    import forerun

    code = (
        f"import sys, json; sys.path[:0] = {list(map(str, [Path(p).parent for p in forerun.__path__]))!r}\n"
        "import forerun.tokenizer, forerun.detokenizer, forerun.stopping\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jinja2", "numpy", "torch", "transformers"} & set(json.loads(run.stdout))
