"""Tiny random checkpoints in Hugging Face's folder format, a few tens of kilobytes each."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

VOCABULARY_SIZE = 272
MAX_POSITIONS = 512

_COMMON = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rms_norm_eps": 1e-6,
}


def tiny_llama(
    folder: Path,
    *,
    query_heads: int = 6,
    kv_heads: int = 2,
    hidden: int = 48,
    intermediate: int = 80,
    tied: bool = False,
    seed: int = 0,
) -> Path:
    """A Llama of three layers, grouped heads unless `kv_heads` equals `query_heads`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    widths = {"hidden_size": hidden, "intermediate_size": intermediate}
    config = LlamaConfig(**{**_COMMON, **widths}, **heads, tie_word_embeddings=tied)
    return save_checkpoint(LlamaForCausalLM(config), folder, seed)


def tiny_llama_of_whole_blocks(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A Llama whose products all have inner sizes that are multiples of 32, as 4-bit weights need them."""
    return tiny_llama(folder, query_heads=8, hidden=64, intermediate=96, tied=tied, seed=seed)


def tiny_qwen2(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A Qwen2 of three layers: biases on queries, keys and values."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    return save_checkpoint(Qwen2ForCausalLM(Qwen2Config(**_COMMON, **heads, tie_word_embeddings=tied)), folder, seed)


def tiny_mistral_with_window(folder: Path, *, seed: int = 0) -> Path:
    """A Mistral whose layers see only the last 32 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    return save_checkpoint(MistralForCausalLM(MistralConfig(**_COMMON, **heads, sliding_window=32)), folder, seed)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level tokens without merges, behind 16 special ones."""
    special = ["<s>", "</s>", *(f"<special{number}>" for number in range(2, 16))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def save_checkpoint(model: Any, folder: Path, seed: int) -> Path:
    """Give the model random weights and save it with a tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_norm = weight.ndim == 1 and name.endswith("weight")
            weight.copy_(1 + 0.2 * noise if is_norm else 0.25 * noise)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def tiny_gguf(folder: Path, *, seed: int = 0) -> Path:
    """The weights of `tiny_llama` as a GGUF file, named as llama.cpp names them."""
    import gguf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama(folder / "source", seed=seed))
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    _write_numbers(writer, model.config)
    for name, weight in model.state_dict().items():
        heads = {"q_proj": 6, "k_proj": 2}.get(name.split(".")[-2], 0)
        array = _interleaved(weight, heads) if heads else weight
        writer.add_tensor(_gguf_name(name), array.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_numbers(writer: Any, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"token{number}" for number in range(config.vocab_size)])
    writer.add_token_merges([])


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring pairs, so its rows alternate between the two halves of a head."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape).contiguous()


def _gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for long, short in parts.items():
        name = name.replace(long, short)
    return name
