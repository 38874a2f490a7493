"""A checkpoint through onnxruntime-genai's own model builder: `python -m .. CHECKPOINT PRECISION FOLDER`.

The builder needs a newer transformers than optimum-onnx allows, so that the two cannot be installed together. It gets
one in a folder of the cache that only its process sees.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

from forerun.errors import ExportError, ForerunError
from forerun_export.bench.cached import built_once
from forerun_export.bench.engines import GENAI_ACCURACY_LEVEL
from forerun_export.bench.places import cache_folder
from forerun_export.eager import load_eager
from forerun_export.sources import Source, resolve
from forerun_export.tokenizers_from_gguf import source_tokenizer
from forerun_export.writer import temporary_sibling

PACKAGE = "onnxruntime-genai"
_TRANSFORMERS = "transformers>=5,<6"


def model_folder_name(checkpoint: str, precision: str) -> str:
    """Its name in the cache. Raises PackageNotFoundError where the package is not installed."""
    return f"genai-{resolve(checkpoint).sha256()[:16]}-{precision}-{importlib.metadata.version(PACKAGE)}"


def model_folder(checkpoint: str, precision: str) -> Path:
    """The folder of the checkpoint's model, made where it is not there yet. Raises ExportError if that fails."""
    failure = f"the builder of {PACKAGE} cannot make a model of {checkpoint}"
    return built_once(model_folder_name(checkpoint, precision), __name__, [checkpoint, precision], failure=failure)


def build(checkpoint: str, precision: str, folder: Path) -> None:
    """Write the model. Raises ExportError with what the builder, or pip, said last."""
    newer = _newer_transformers()
    with temporary_sibling(folder) as temporary:
        source, made = temporary / "checkpoint", temporary / "model"
        source.mkdir()
        write_checkpoint(resolve(checkpoint), source)
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *builder_options(precision)]
        command += ["-i", str(source), "-o", str(made), "-c", str(temporary / "cache")]
        path = os.pathsep.join([str(newer), *filter(None, [os.environ.get("PYTHONPATH")])])
        _run(command, environment={"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"})
        made.replace(folder)


def builder_options(precision: str) -> list[str]:
    """What the builder is asked for: everything else is as it would have it."""
    level = [] if precision == "fp32" else ["--extra_options", f"accuracy_level={GENAI_ACCURACY_LEVEL}"]
    return ["-p", precision, "-e", "cpu", *level]


def write_checkpoint(source: Source, folder: Path) -> None:
    """The source as a Hugging Face folder in float32, whatever it is itself."""
    load_eager(source).save_pretrained(folder)
    tokenizer = source_tokenizer(source.path)
    tokenizer.save(folder)
    said = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    known = {name: text for name, text in said.items() if text is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **known}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _newer_transformers() -> Path:
    """A folder with the transformers that the builder needs, and what that needs."""
    folder = cache_folder() / "genai-builder-packages"
    if not folder.is_dir():
        with temporary_sibling(folder) as temporary:
            options = ["--quiet", "--no-input", "--disable-pip-version-check", "--only-binary", ":all:"]
            command = [sys.executable, "-m", "pip", "install", *options, "--target", str(temporary / "packages")]
            _run([*command, _TRANSFORMERS], environment={})
            (temporary / "packages").replace(folder)
    return folder


def _run(command: list[str], *, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        raise ExportError(f"{command[2]} says {said}")


if __name__ == "__main__":
    try:
        build(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    except ForerunError as error:
        sys.exit(str(error))
