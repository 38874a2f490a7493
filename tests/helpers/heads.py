"""Draft heads with random weights, as folders, for tiny checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ExportError
from forerun.tokenizer import vocabulary_sha256
from forerun_export.eager import eager_config
from forerun_export.heads.folder import HeadRecord, HeadTarget, write_head
from forerun_export.sources import resolve
from forerun_export.tokenizers_from_gguf import source_tokenizer


def random_head(folder: Path, target: Path, *, tokens: int = 100, seed: int = 0, scale: float = 0.25) -> Path:
    """A head for the checkpoint `target`: weights drawn at random, `tokens` candidate tokens chosen at random.

    For a checkpoint whose tokenizer cannot be built it fits no token map.
    """
    import torch
    from transformers import AutoModelForCausalLM

    source = resolve(str(target))
    config = eager_config(source)
    layers = config.num_hidden_layers
    config.num_hidden_layers, vocabulary = 1, config.vocab_size
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    shapes = {f"layer.{name}": tuple(weight.shape) for name, weight in model.get_decoder().layers[0].named_parameters()}
    size = config.hidden_size
    shapes |= {"fuse.weight": (size, 3 * size), "join.weight": (size, 2 * size)}
    shapes |= {f"{name}.weight": (size,) for name in ("embedding_norm", "feature_norm", "norm")}
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        noise = random.normal(size=shape)
        tensors[name] = (1 + 0.2 * noise if len(shape) == 1 and "norm" in name else scale * noise).astype(np.float16)
    chosen = np.sort(random.choice(vocabulary, size=tokens, replace=False))
    tensors["tokens"] = chosen.astype(np.int32)
    numbers = HeadTarget(source.sha256(), _vocabulary_sha256(target), vocabulary, size)
    record = HeadRecord(1, numbers, (1, max(1, layers // 2), layers), config.rms_norm_eps)
    write_head(folder, record, tensors, "A head with random weights.")
    return folder


def _vocabulary_sha256(target: Path) -> str:
    try:
        return vocabulary_sha256(source_tokenizer(target).tokenizer)
    except ExportError:
        return "0" * 64
