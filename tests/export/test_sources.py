"""A checkpoint is found by file, folder or hub id; what is not whole is refused with what to do."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from forerun.errors import ExportError
from forerun_export.sources import resolve
from helpers.checkpoints import tiny_gguf, tiny_llama


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("folder"))


@pytest.fixture
def folder(whole_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_folder, tmp_path / "model"))


def refusal(text: Path | str) -> str:
    with pytest.raises(ExportError) as caught:
        resolve(str(text))
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message, "what is wrong; what to do"
    return message


def test_a_gguf_file_and_a_folder_are_told_apart(gguf: Path, folder: Path) -> None:
    assert resolve(str(gguf)).kind == "gguf"
    assert resolve(str(folder)).kind == "folder"
    assert resolve(str(folder)).path == folder


def test_the_hash_follows_the_content_and_not_the_name(gguf: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(gguf, tmp_path / "other.gguf"))
    assert resolve(str(copy)).sha256() == resolve(str(gguf)).sha256()
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    assert resolve(str(copy)).sha256() != resolve(str(gguf)).sha256()


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors", "tokenizer.json"])
def test_the_hash_of_a_folder_covers_every_file_of_the_checkpoint(folder: Path, changed: str) -> None:
    before = resolve(str(folder)).sha256()
    (folder / "README.md").write_text("not part of it")
    assert resolve(str(folder)).sha256() == before
    (folder / changed).write_bytes((folder / changed).read_bytes() + b" ")
    assert resolve(str(folder)).sha256() != before


def test_the_numbers_of_the_architecture_are_read(gguf: Path, folder: Path) -> None:
    assert resolve(str(gguf)).config()["llama.block_count"] == 3
    assert resolve(str(folder)).config()["num_hidden_layers"] == 3


@pytest.mark.parametrize("keep", [0, 3, 20, 600, 5000, -1])
def test_a_gguf_file_cut_anywhere_is_refused(gguf: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[:keep])
    assert str(cut) in refusal(cut)


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("A longer text that is no checkpoint at all.")
    assert "no GGUF file" in refusal(tmp_path / "notes.txt")


def _cut_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def _missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _only_a_gguf_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


FAULTS: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "weights cut off": (_cut_weights, "model.safetensors is truncated"),
    "weights that are noise": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64),
        "model.safetensors is corrupt",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    "a shard missing": (_missing_shard, "model-00001-of-00002.safetensors is missing"),
    "pickled weights": (_pickled_weights, "save_pretrained"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "a GGUF file in the folder": (_only_a_gguf_file, "name the file"),
    "a broken configuration": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "a configuration of nothing": (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_not_whole_is_refused(folder: Path, fault: str) -> None:
    break_it, message = FAULTS[fault]
    break_it(folder)
    assert message in refusal(folder)


@pytest.mark.parametrize("text", ["checkpoints/absent.gguf", "/absent/folder", "./absent/folder", "absent"])
def test_what_is_no_file_and_no_hub_id_is_refused_without_asking_the_hub(text: str) -> None:
    assert f"{text} does not exist" in refusal(text)


def refused_by_hub(tmp_path: Path, **environment: str) -> str:
    """The message for a hub id in a process of its own: the hub's client reads its environment once."""
    command = (
        "from forerun_export.sources import resolve\n"
        "from forerun.errors import ExportError\n"
        "try: resolve('nobody/no-such-model')\n"
        "except ExportError as error: print(error)\n"
    )
    variables = {"HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.strip()


def test_an_unreachable_hub_says_what_to_do(tmp_path: Path) -> None:
    message = refused_by_hub(tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert "http://127.0.0.1:9 cannot be reached" in message
    assert "HF_ENDPOINT" in message
    assert "give the folder" in message


def test_an_offline_hub_says_what_to_do(tmp_path: Path) -> None:
    message = refused_by_hub(tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in message
    assert "give the folder" in message
