"""A trained head's decoder graph, made by the target's own front end.

The head's layer goes into a checkpoint of the target's kind with a single layer and a vocabulary of a few tokens,
which the front end builds as it builds the target. Embedding and head are then the target's (`read_features`). So
whatever architectures a front end knows, their heads it knows too.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from forerun.errors import ExportError
from forerun_export.eager import eager_config
from forerun_export.frontends import Decoder, build_decoder
from forerun_export.head_files import TrainedHead
from forerun_export.passes import keep_features, read_features
from forerun_export.passes.read_features import Join
from forerun_export.recipe import Frontend
from forerun_export.sources import Source, resolve

FEW_TOKENS = 16
"""Vocabulary of the checkpoint with one layer."""


def with_features(target: Decoder, head: TrainedHead) -> Decoder:
    """The target that keeps the features which the head reads. It shares this one's tensors."""
    model, record = target.model.clone(), head.record
    keep_features.apply(model, layers=record.feature_layers, fuse=head.weight("fuse"), epsilon=record.epsilon)
    return replace(target, model=model)


def build_head(head: TrainedHead, source: Source, target: Decoder, *, context: int, frontend: Frontend) -> Decoder:
    """The head's graph; embedding and head are those of `target`, built from `source`.

    Raises ExportError if the head does not fit the target.
    """
    with tempfile.TemporaryDirectory(prefix="forerun-head-") as name:
        folder = Path(name)
        _save_checkpoint(head, source, folder)
        decoder = build_decoder(resolve(str(folder)), context=context, frontend=frontend)
        _keep_in_memory(decoder)
    join = Join(head.weight("join"), head.weight("embedding_norm"), head.weight("feature_norm"), head.record.epsilon)
    shared = read_features.shared_with(target.model, head.tokens)
    read_features.apply(decoder.model, join=join, shared=shared, tokens=head.tokens)
    architecture = replace(decoder.architecture, vocabulary_size=shared.vocabulary_size)
    return replace(decoder, architecture=architecture)


def _save_checkpoint(head: TrainedHead, source: Source, folder: Path) -> None:
    """A checkpoint of the source's kind in which the head's layer is the only one."""
    from transformers import AutoModelForCausalLM

    config = eager_config(source)
    config.num_hidden_layers = 1
    # A head sees the whole text, in training too, whatever its target sees: caches hold all of it anyway.
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if getattr(config, "sliding_window", None):
        config.sliding_window = None
    config.vocab_size, config.tie_word_embeddings = FEW_TOKENS, False
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    decoder = model.get_decoder()
    try:
        decoder.layers[0].load_state_dict(_tensors(head.layer))
        decoder.norm.load_state_dict(_tensors({"weight": head.weight("norm")}))
    except (AttributeError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ExportError(f"{head.path} is no head for {source.text} ({reason}); train one for it") from error
    model.save_pretrained(folder)


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _keep_in_memory(decoder: Decoder) -> None:
    """Copies of all tensors: the files that they are mapped from go away."""
    for name, value in decoder.model.graph.initializers.items():
        if value.const_value is not None:
            value.const_value = ir.tensor(np.array(value.const_value.numpy()), name=name)
