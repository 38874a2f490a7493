"""The architectures that are tested, each on a tiny random checkpoint: the README's table.

    python -m forerun_export.architectures

prints it. Other architectures that a front end can make may well work: an export is compared with its checkpoint
always, and refused where they differ.
"""

from dataclasses import dataclass

PRECISIONS = "fp32, int8, int4"


@dataclass(frozen=True)
class KnownArchitecture:
    """One row. `model_type` is what config.json calls it; `auto` takes the first of `frontends`.

    `error` is the largest difference of the traced graph's logits from PyTorch in float64, as a multiple of what
    float32 costs PyTorch itself on the same prompt.
    """

    model_type: str
    name: str
    frontends: tuple[str, ...]
    what: str
    error: float


BOTH, TRACED = ("mobius", "optimum"), ("optimum",)
ARCHITECTURES = (
    KnownArchitecture("llama", "Llama", BOTH, "grouped heads", 1.3),
    KnownArchitecture("qwen2", "Qwen2, Qwen2.5", BOTH, "biases on queries, keys and values", 1.3),
    KnownArchitecture("qwen3", "Qwen3", BOTH, "norms of queries and keys", 1.4),
    KnownArchitecture("phi3", "Phi-3", BOTH, "fused projections, partial rotary positions", 1.3),
    KnownArchitecture("mistral", "Mistral", TRACED, "a sliding window (without one: mobius too)", 1.2),
    KnownArchitecture("gemma2", "Gemma 2", TRACED, "soft caps, every other layer with a window", 2.0),
    KnownArchitecture("gemma3_text", "Gemma 3", TRACED, "local and global layers with rotary tables of their own", 1.2),
    KnownArchitecture("gpt2", "GPT-2", TRACED, "learned positions", 1.0),
    KnownArchitecture("gpt_neox", "GPT-NeoX, Pythia", TRACED, "parallel residual, partial rotary positions", 1.1),
    KnownArchitecture("opt", "OPT", TRACED, "learned positions with an offset", 1.3),
    KnownArchitecture("bloom", "Bloom", TRACED, "ALiBi", 1.5),
    KnownArchitecture("falcon", "Falcon", TRACED, "one KV head, with rotary positions or ALiBi", 1.4),
)


def table() -> str:
    """The README's table, in Markdown."""
    lines = ["| model | front ends | precisions | error | holds |", "| --- | --- | --- | --- | --- |"]
    for row in ARCHITECTURES:
        frontends = ", ".join(row.frontends)
        lines.append(f"| {row.name} (`{row.model_type}`) | {frontends} | {PRECISIONS} | {row.error:.1f} | {row.what} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
