"""Prompts in every form, and engine directories that do not fit together."""

import dataclasses
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forerun
from forerun import Decoder, EngineError, Request, RequestError
from forerun.manifest import MANIFEST_NAME, Manifest
from forerun_export.writer import file_records
from helpers.reference import greedy
from helpers.table_models import TablePair, engine_directory, random_model, table_pair, words


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TablePair:
    return table_pair(tmp_path_factory.mktemp("pair") / "engines")


@pytest.fixture(scope="module")
def decoder(pair: TablePair) -> Decoder:
    return pair.open()


@pytest.mark.parametrize(
    ("prompt", "controls"),
    [
        ([1, 2, 3], {}),
        ((1, 2, 3), {}),
        ("w1 w2 w3", {}),
        ("w1 w2 w3", {"raw": True}),
        ([{"role": "user", "content": "w1 w2 w3"}], {}),
        ([{"role": "system", "content": "w1 "}, {"role": "user", "content": "w2 w3"}], {}),
        (Request([1, 2, 3]), {}),
        (range(1, 4), {}),
        (deque([1, 2, 3]), {}),
        (array("H", [1, 2, 3]), {}),
        (np.array([1, 2, 3]), {}),
        (np.array([1, 2, 3], np.uint8)[::1], {}),
        ([np.int64(1), np.uint8(2), 3], {}),
        (list(torch.tensor([1, 2, 3])), {}),
        (torch.tensor([1, 2, 3], dtype=torch.int32), {}),
        (Request.of(np.array([1, 2, 3])), {}),
    ],
)
def test_a_prompt_may_be_tokens_text_or_messages(
    pair: TablePair, decoder: Decoder, prompt: Any, controls: dict[str, Any]
) -> None:
    if not isinstance(prompt, Request):
        controls["max_new_tokens"] = 5
    generation = decoder.generate(prompt, **controls)
    assert generation.prompt_tokens == 3
    assert generation.token_ids[:5] == greedy(pair.target, [1, 2, 3], 5)


def test_a_batch_may_mix_forms_and_gives_a_list_even_of_one(pair: TablePair, decoder: Decoder) -> None:
    expected = greedy(pair.target, [1, 2], 4)
    batch = [[1, 2], "w1 w2", [{"role": "user", "content": "w1 w2"}]]
    assert [one.token_ids for one in decoder.generate(batch, max_new_tokens=4)] == [expected] * 3
    only = decoder.generate([[1, 2]], max_new_tokens=4)
    assert [one.token_ids for one in only] == [expected]


@pytest.mark.parametrize(
    "batch", [np.array([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]]), [np.array([1, 2]), [3, 4]]]
)
def test_an_array_of_two_dimensions_is_a_batch_of_its_rows(pair: TablePair, decoder: Decoder, batch: Any) -> None:
    found = decoder.generate(batch, max_new_tokens=4)
    assert [one.token_ids for one in found] == [greedy(pair.target, prompt, 4) for prompt in ([1, 2], [3, 4])]


def test_a_stream_takes_an_array_and_what_is_kept_of_it_is_plain(pair: TablePair, decoder: Decoder) -> None:
    tokens = np.array([1, 2])
    request = Request.of(tokens)
    chunks = decoder.stream(tokens, max_new_tokens=4)
    tokens[:] = 7
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == greedy(pair.target, [1, 2], 4)
    assert request.prompt == (1, 2)
    assert [type(token) for token in request.prompt] == [int, int]


def test_a_request_keeps_its_own_controls(decoder: Decoder) -> None:
    long, short = decoder.generate([[1, 2], Request.of([1, 2], max_new_tokens=2)], max_new_tokens=6)
    assert (len(long.token_ids), len(short.token_ids)) == (6, 2)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "a batch is a list of prompts; got list with nothing in it"),
        ([[]], "the prompt is empty"),
        (None, "a prompt is a text, a list of token ids or a list of chat messages.* got NoneType"),
        (7, "got int"),
        ([1, "w2"], "a prompt is a text"),
        ([1.5], "a prompt is a text"),
        ([True], "a prompt is a text"),
        ([[1, 2.5]], "a prompt is a text.*; got a list whose item 1 is 2.5"),
        ([["w1"]], "a prompt is a text.*; got a list whose item 0 is 'w1'"),
        (iter([1, 2]), "got list_iterator"),
        ({1, 2}, "got set"),
        ({"role": "user", "content": "w1"}, "got dict"),
        (b"w1 w2", r"the prompt is bytes, neither text nor token ids; give prompt.decode\(\) for text"),
        (bytearray(b"w1"), "the prompt is bytearray, neither text nor token ids"),
        (memoryview(b"w1"), "the prompt is memoryview, neither text nor token ids"),
        ([b"w1"], "the prompt is bytes, neither text nor token ids"),
        (np.array([1.0, 2.0]), "got a list whose item 0 is 1.0"),
        (np.array([True]), "got a list whose item 0 is True"),
        ([np.True_], "got a list whose item 0 is np.True_"),
        (np.array(3), "got ndarray"),
        (np.zeros((1, 2, 1), int), r"got a list whose item 0 is \[0\]"),
        (np.array([], int), "got ndarray with nothing in it"),
        (torch.tensor([1.5]), "got a list whose item 0 is 1.5"),
        ([1, 8], "token 8 is not in the vocabulary; ids go from 0 to 7"),
        ([-1], "token -1 is not in the vocabulary"),
        ("\ud800", "the prompt is no valid Unicode text"),
    ],
)
def test_a_prompt_that_is_none_is_refused(decoder: Decoder, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        decoder.generate(prompt)


def test_a_wrong_request_is_refused_when_a_stream_is_asked_for(decoder: Decoder) -> None:
    with pytest.raises(RequestError, match="token 99"):
        decoder.stream([99])
    with pytest.raises(RequestError, match="temperature is -1"):
        decoder.stream([1], temperature=-1)


def test_a_draft_length_above_the_exported_one_is_refused(decoder: Decoder) -> None:
    with pytest.raises(RequestError, match="draft_length is 9; these engines were exported for at most 8"):
        decoder.generate([1], draft_length=9)


def test_a_seed_is_taken_and_told_where_none_is_given(decoder: Decoder) -> None:
    controls = {"temperature": 1.0, "max_new_tokens": 12, "draft_length": 4}
    first = decoder.generate([1], **controls)
    again = decoder.generate([1], **controls, seed=first.seed, law="block")
    other = decoder.generate([1], **controls)
    assert again.token_ids == first.token_ids
    assert other.seed != first.seed


def test_without_a_draft_model_the_text_itself_is_the_draft(pair: TablePair, tmp_path: Path) -> None:
    engines = engine_directory(tmp_path / "engines", pair.target)
    with forerun.open(engines) as alone, forerun.open(pair.path, load_draft=False) as unloaded:
        for decoder in (alone, unloaded):
            assert decoder.generate([1, 2], max_new_tokens=9).stats.draft == "ngram"
            generation = decoder.generate([1, 2], max_new_tokens=9, draft="none")
            assert generation.token_ids == greedy(pair.target, [1, 2], 9)
            assert (generation.stats.draft, generation.stats.proposed, generation.stats.rounds) == ("none", 0, 9)
            with pytest.raises(RequestError, match="draft model: this engine directory has none"):
                decoder.generate([1], draft="model")


def test_the_json_of_a_generation_has_what_the_command_line_promises(decoder: Decoder) -> None:
    data = decoder.generate([1, 2], max_new_tokens=9).to_json()
    assert data.keys() >= {"text", "token_ids", "prompt_tokens", "finish_reason", "stats"}
    assert data["stats"].keys() >= {
        *(
            "rounds",
            "proposed",
            "accepted",
            "corrections",
            "bonuses",
            "truncated",
            "emitted",
            "acceptance_rate",
        ),
        *("tokens_per_round", "accepted_by_position", "prefill_s", "decode_s", "tokens_per_s"),
        *("host_bytes_per_round", "law", "draft"),
    }


# Directories


def change_manifest(folder: Path, **changes: Any) -> None:
    manifest = Manifest.read(folder / MANIFEST_NAME)
    manifest = dataclasses.replace(manifest, **changes)
    dataclasses.replace(manifest, files=file_records(folder)).write(folder / MANIFEST_NAME)


def test_a_draft_with_other_tokens_is_refused_though_there_are_as_many(tmp_path: Path) -> None:
    folder = table_pair(tmp_path / "engines").path
    draft = Manifest.read(folder / MANIFEST_NAME).draft
    assert draft is not None
    change_manifest(folder, draft=dataclasses.replace(draft, vocabulary_sha256="9" * 64))
    with pytest.raises(EngineError, match="the draft's 8 tokens are not the target's: same size, another token map"):
        forerun.open(folder)


def test_a_graph_that_is_no_decoder_is_refused(tmp_path: Path) -> None:
    folder = table_pair(tmp_path / "engines").path
    (folder / "target" / "model.onnx").write_bytes((folder / "sampling" / "draw.onnx").read_bytes())
    change_manifest(folder)
    with pytest.raises(EngineError, match=r"target/model.onnx is not a decoder graph.*input_ids is missing"):
        forerun.open(folder)


def test_a_graph_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    folder = table_pair(tmp_path / "engines").path
    (folder / "draft" / "model.onnx").write_bytes(b"not a graph")
    change_manifest(folder)
    with pytest.raises(EngineError, match=r"draft/model.onnx: onnxruntime cannot load it .*; export the pair again"):
        forerun.open(folder)


def test_a_missing_sampling_graph_is_refused_when_the_directory_is_opened(tmp_path: Path) -> None:
    folder = table_pair(tmp_path / "engines").path
    sampling = dict(Manifest.read(folder / MANIFEST_NAME).sampling)
    del sampling["verify-residual"]
    change_manifest(folder, sampling=sampling)
    with pytest.raises(EngineError, match="verify-residual"):
        forerun.open(folder)


def test_a_vocabulary_larger_than_the_tokenizers_may_be_decoded(tmp_path: Path) -> None:
    # Many models pad their embedding; a padding token has no text.
    target = random_model(5, vocabulary=12)
    with forerun.open(engine_directory(tmp_path / "engines", target, tokenizer=words(8))) as decoder:
        generation = decoder.generate([11, 10], max_new_tokens=30)
    assert generation.token_ids == greedy(target, [11, 10], 30)
    assert max(generation.token_ids) > 7
    assert len(generation.text.split()) == sum(token < 8 for token in generation.token_ids)
