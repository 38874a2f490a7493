"""What a chat template is given beside the messages."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import forerun
from forerun import Controls, Request, RequestError
from forerun.chat import ChatTemplate
from forerun.cli import main
from forerun.manifest import MANIFEST_NAME, Manifest
from forerun_export.writer import file_records
from helpers.small_tokenizers import byte_level
from helpers.table_models import TablePair, engine_directory, random_model, table_pair, words

CHAT = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{% endif %}"
)
TRIMMING = CHAT.replace("m.content", "m.content | trim")
MESSAGES = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two  "}]


def rendered(template: str = CHAT, messages: Any = MESSAGES, **arguments: Any) -> str:
    return ChatTemplate(template).render(messages, arguments)


def test_a_template_is_given_any_argument_and_does_what_it_likes_with_it() -> None:
    usual = "[user]one[end][assistant]two  [end]"
    assert rendered() == f"{usual}[assistant]"
    assert rendered(enable_thinking=False) == f"{usual}[assistant]False"
    assert rendered(tools=[{"name": "f"}]) == f'[{{"name": "f"}}]{usual}[assistant]'
    assert rendered(add_generation_prompt=False) == usual
    assert rendered(unheard_of=1) == f"{usual}[assistant]"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("two", "two"),
        ("two  ", "two  "),
        (" e", " e"),
        ("[end]", "[end]"),
        ("", ""),
        ([{"type": "text", "text": "two"}, {"type": "image"}], "two"),
    ],
)
def test_continuing_the_last_message_ends_where_its_text_ends(content: Any, text: str) -> None:
    template = CHAT.replace("m.content", "m.content if m.content is string else m.content[0].text")
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    assert (
        rendered(template, messages, continue_final_message=True)
        == f"{rendered(add_generation_prompt=False)}[assistant]{text}"
    )


def test_spaces_at_the_end_that_the_template_cuts_off_are_cut_off() -> None:
    assert rendered(TRIMMING, continue_final_message=True) == "[user]one[end][assistant]two"
    assert rendered("{{ messages[1].content }}.{{ messages[1].content }}", continue_final_message=True) == "two  .two  "


@pytest.mark.parametrize("template", [CHAT, TRIMMING])
@pytest.mark.parametrize("last", ["two", "two  ", " two", "t\n"])
def test_continuing_is_what_transformers_does(template: str, last: str) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=template)
    messages = [MESSAGES[0], {"role": "assistant", "content": last}]
    for arguments in ({"continue_final_message": True}, {"add_generation_prompt": True, "enable_thinking": True}):
        expected = reference.apply_chat_template(messages, tokenize=False, **arguments)
        assert rendered(template, messages, **arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": []}, "template_arguments: messages is not an argument: it comes with the prompt or the model"),
        ({"eos_token": "x"}, "template_arguments: eos_token is not an argument"),
        ({"raise_exception": 1}, "template_arguments: raise_exception is not an argument"),
        ({"two words": 1}, "template_arguments: 'two words' is no name that a template could use"),
        ({3: 1}, "template_arguments: 3 is no name"),
        ([1], "template_arguments is [1]; give a mapping"),
    ],
)
def test_arguments_that_no_template_could_take_are_refused_at_once(arguments: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Request.of("one", template_arguments=arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        (MESSAGES, {"continue_final_message": True, "add_generation_prompt": True}, "begins another; give one"),
        (MESSAGES, {"continue_final_message": "yes"}, "continue_final_message is 'yes'; give True or False"),
        (MESSAGES, {"add_generation_prompt": 1}, "add_generation_prompt is 1; give True or False"),
        ([{"role": "assistant", "content": None}], {"continue_final_message": True}, "no text to continue"),
        ([{"role": "assistant", "content": [{"a": 1}]}], {"continue_final_message": True}, "no text to continue"),
        ([], {"continue_final_message": True}, "no text to continue"),
    ],
)
def test_arguments_that_mean_nothing_together_are_refused(messages: Any, arguments: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rendered(CHAT, messages, **arguments)
    with pytest.raises(RequestError, match="does not print the last message's content as it is"):
        rendered("{{ messages[-1].content | upper | length }}", continue_final_message=True)


def test_arguments_are_copied_when_the_controls_are_made() -> None:
    tools = [{"name": "f"}]
    controls = Controls(template_arguments={"tools": tools})
    tools[0]["name"] = "g"
    tools.append({})
    assert controls.template_arguments == {"tools": [{"name": "f"}]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines")


def test_arguments_need_a_prompt_that_goes_through_the_template(pair: TablePair) -> None:
    with pair.open() as decoder, pytest.raises(RequestError, match="token ids go through no chat template"):
        decoder.generate([1, 2], template_arguments={"tools": []})
    with pytest.raises(RequestError, match="a raw prompt goes through no chat template"):
        Controls(raw=True, template_arguments={"tools": []})


@pytest.mark.parametrize(
    ("prompt", "controls", "place"),
    [
        ("w1 \ud800", {}, "the prompt is no valid Unicode text at character 3, counted from 0"),
        ("w1 \ud800", {"raw": True}, "the prompt is no valid Unicode text at character 3"),
        (
            [{"role": "user", "content": "w1"}, {"role": "user", "content": "w\udc00"}],
            {},
            r"messages\[1\].content is no valid Unicode text at character 1",
        ),
        ([{"role": "user", "content": [{"text": "\udc00"}]}], {}, r"messages\[0\].content\[0\].text is no valid"),
        ([{"role": "user", "content": "w1", "a\udc00": 1}], {}, r"a key of messages\[0\] is no valid Unicode text at"),
        (
            "w1",
            {"template_arguments": {"tools": ["w\udc00"]}},
            r"template_arguments.tools\[0\] is no valid .* character 1",
        ),
    ],
)
def test_half_a_character_is_told_where_it_stands_in_what_was_given(
    pair: TablePair, prompt: Any, controls: dict[str, Any], place: str
) -> None:
    with pair.open() as decoder, pytest.raises(RequestError, match=place):
        decoder.generate(prompt, **controls)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines whose template prints its arguments."""
    tokenizer = words(8)
    tokenizer.add_special_tokens(["w7"])
    folder = tmp_path_factory.mktemp("thinking") / "engines"
    engine_directory(folder, random_model(3, vocabulary=8), tokenizer=tokenizer)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} {{ a }} {{ b }}")
    manifest = Manifest.read(folder / MANIFEST_NAME)
    dataclasses.replace(manifest, files=file_records(folder)).write(folder / MANIFEST_NAME)
    return folder


def test_the_command_line_takes_arguments_as_json(thinking: Path) -> None:
    arguments = ("generate", thinking, "w1", "--json", "--max-new-tokens", 3)
    result = run(*arguments, "--template-arg", 'a="w3"', "--template-arg", 'b="w2 = w2"')
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["prompt_tokens"] == 5
    with forerun.open(thinking) as decoder:
        expected = decoder.generate("w1", max_new_tokens=3, template_arguments={"a": "w3", "b": "w2 = w2"})
    assert found["token_ids"] == list(expected.token_ids)


def test_the_command_line_can_parse_special_tokens(thinking: Path) -> None:
    arguments = ("generate", thinking, "w1 w7", "--json", "--max-new-tokens", 3)
    told = json.loads(run(*arguments, "--parse-special").stdout)
    with forerun.open(thinking) as decoder:
        assert decoder.generate("w1 w7", max_new_tokens=3, parse_special=True).token_ids == tuple(told["token_ids"])
        assert decoder.generate([1, 7], max_new_tokens=3).token_ids == tuple(told["token_ids"])
        # This vocabulary of words spells it in letters that it does not know.
        assert decoder.generate("w1 w7", max_new_tokens=3).prompt_tokens == 3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["a"], "'a' is not NAME=JSON, as in enable_thinking=false"),
        (["a=yes"], "'a=yes': 'yes' is no JSON"),
        (["a="], "'a=': '' is no JSON"),
        (["a=1", "a=2"], "a is given twice"),
        (["=1"], "'' is no name that a template could use"),
        (["messages=[]"], "messages is not an argument"),
    ],
)
def test_a_wrong_argument_is_one_line(thinking: Path, given: list[str], says: str) -> None:
    result = run("generate", thinking, "w1", *(part for one in given for part in ("--template-arg", one)))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert says in result.stderr
