"""Engine directories whose files are a few bytes each: for what reads the manifest and not the graphs."""

import hashlib
from dataclasses import replace
from pathlib import Path

from forerun.manifest import (
    MANIFEST_NAME,
    Architecture,
    BackendRecord,
    FileRecord,
    Limits,
    Manifest,
    ModelRecord,
    Parity,
    TokenizerRecord,
)

CONTENTS = {
    "target/model.onnx": b"target graph",
    "target/model.onnx.data": b"weights of the target",
    "draft/model.onnx": b"draft graph",
    "sampling/draw.onnx": b"draw",
    "sampling/verify-residual.onnx": b"verify",
    "tokenizer.json": b"{}",
}
VOCABULARY_SHA256 = "1" * 64


def sample_manifest() -> Manifest:
    """A manifest of CONTENTS: a target and a draft that shares its weights."""
    target = ModelRecord(
        graph="target/model.onnx",
        weights="target/model.onnx.data",
        source="model.gguf",
        source_sha256="2" * 64,
        architecture=Architecture("llama", 30, 9, 3, 64, 576, 49152, 8192),
        precision="fp32",
        frontend="mobius",
        layers_left_out=(),
        vocabulary_sha256=VOCABULARY_SHA256,
        parity=Parity(reference="PyTorch eager float32", max_error=1e-5, bound=1e-4, cases=12),
    )
    return Manifest(
        schema=1,
        forerun="0.1.0",
        recipe_sha256="3" * 64,
        target=target,
        draft=replace(target, graph="draft/model.onnx", layers_left_out=(14,), parity=None),
        sampling={"draw": "sampling/draw.onnx", "verify-residual": "sampling/verify-residual.onnx"},
        tokenizer=TokenizerRecord(VOCABULARY_SHA256, end_tokens=(2, 0), bos_token="<|im_start|>", eos_token=None),
        limits=Limits(batch=8, context=2048, draft_length=8),
        backend=BackendRecord("onnxruntime", "cpu", {"onnxruntime": "1.32.0"}),
        files={name: record(content) for name, content in CONTENTS.items()},
    )


def record(content: bytes) -> FileRecord:
    """The record of a file with this content."""
    return FileRecord(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def write_engine_directory(folder: Path, manifest: Manifest | None = None) -> Path:
    """Write CONTENTS and the manifest (sample_manifest unless given) to ``folder``."""
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (manifest or sample_manifest()).write(folder / MANIFEST_NAME)
    return folder
