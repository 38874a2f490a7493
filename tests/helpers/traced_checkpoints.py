"""Tiny random checkpoints of every tested architecture, in Hugging Face's folder format."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helpers.checkpoints import MAX_POSITIONS, VOCABULARY_SIZE, save_checkpoint

_TOKENS = {"vocab_size": VOCABULARY_SIZE, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_LLAMA_LIKE = {
    **_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}
_WINDOW = 8
_GEMMA_LIKE = {**_LLAMA_LIKE, "sliding_window": _WINDOW, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
_BLOOM_LIKE = {**_TOKENS, "hidden_size": 64, "n_layer": 3, "n_head": 8}
_FALCON_LIKE = {**_TOKENS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}

TINY: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "qwen2": {**_LLAMA_LIKE, "tie_word_embeddings": True},
    "qwen3": {**_LLAMA_LIKE, "head_dim": 16},
    "phi3": {**_LLAMA_LIKE, "partial_rotary_factor": 0.5},
    "mistral": {**_LLAMA_LIKE, "sliding_window": _WINDOW},
    "gemma2": _GEMMA_LIKE,
    "gemma3_text": {**_GEMMA_LIKE, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt2": {**_TOKENS, "n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": MAX_POSITIONS},
    "gpt_neox": {**_LLAMA_LIKE, "rotary_pct": 0.5, "use_parallel_residual": True},
    "opt": {
        **_TOKENS,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "max_position_embeddings": MAX_POSITIONS,
    },
    "bloom": _BLOOM_LIKE,
    "falcon": {**_FALCON_LIKE, "alibi": False, "multi_query": True, "parallel_attn": True},
}
"""The configuration of each model type: three layers; products whose inner sizes are multiples of 32 (4-bit blocks)."""

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "falcon with ALiBi": ("falcon", {**_FALCON_LIKE, "alibi": True, "multi_query": False, "parallel_attn": False}),
    "bloom with 6 heads": ("bloom", {**_BLOOM_LIKE, "hidden_size": 48, "n_head": 6}),
    "llama, one head to a KV head": ("llama", {**_LLAMA_LIKE, "num_key_value_heads": 8}),
    "gpt_neox, residuals in turn": ("gpt_neox", {**TINY["gpt_neox"], "use_parallel_residual": False}),
}
"""Further kinds of the same architectures."""


def tiny(folder: Path, model_type: str, *, seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint of `model_type` in `folder`, with some numbers of its configuration changed."""
    return of_configuration(folder, model_type, {**TINY[model_type], **changes}, seed=seed)


def of_configuration(folder: Path, model_type: str, numbers: Mapping[str, Any], *, seed: int = 0) -> Path:
    """A random checkpoint with these numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **numbers)
    return save_checkpoint(AutoModelForCausalLM.from_config(config), folder, seed)


MAKERS: Mapping[str, Callable[[Path], Path]] = {
    **{name: lambda folder, name=name: tiny(folder, name) for name in TINY},  # type: ignore[misc]
    **{
        name: lambda folder, kind=kind, numbers=numbers: of_configuration(folder, kind, numbers)  # type: ignore[misc]
        for name, (kind, numbers) in VARIANTS.items()
    },
}
"""Every checkpoint by name: called with a folder."""
