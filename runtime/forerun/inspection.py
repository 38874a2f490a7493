"""`forerun inspect`: an engine directory in words, and the checks that are too slow for every start."""

from __future__ import annotations

from typing import Any

from forerun.backends import open_backend
from forerun.contract import check, features_of
from forerun.directory import EngineDirectory
from forerun.errors import ForerunError
from forerun.manifest import ModelRecord, Quantization
from forerun.schema import unparse
from forerun.tokenizer import Tokenizer


def violations(engines: EngineDirectory) -> list[str]:
    """Everything wrong that hashing all files and loading all graphs brings to light."""
    if found := engines.verify():
        return found  # no use in loading what has changed
    manifest = engines.manifest
    backend = open_backend(manifest.backend.name, manifest.backend.device)
    for role, record in (("target", manifest.target), ("draft", manifest.draft)):
        if record is not None:
            graph = engines.file(record.graph)
            try:
                engine = backend.load(graph, weights_folder=engines.file(record.weights).parent)
                check(engine, record.architecture, graph, features_of(role, manifest))
            except ForerunError as error:
                found.append(str(error))
    tokenizer = Tokenizer.open(engines.path, end_tokens=manifest.tokenizer.end_tokens, bos_token=None, eos_token=None)
    if tokenizer.vocabulary_sha256() != manifest.tokenizer.vocabulary_sha256:
        found.append("tokenizer.json has another token map than the manifest records")
    return found


def to_json(engines: EngineDirectory, found: list[str] | None, *, shapes_checked: bool = False) -> dict[str, Any]:
    """The object that `forerun inspect --json` prints: the manifest, and with --verify what it found."""
    manifest = unparse(engines.manifest)
    return {
        "path": str(engines.path),
        "manifest": manifest,
        "violations": found,
        "shapes_checked": shapes_checked,
    }


def describe(engines: EngineDirectory, found: list[str] | None, *, shapes_checked: bool = False) -> str:
    """The same for people."""
    manifest, limits = engines.manifest, engines.manifest.limits
    lines = [
        f"{engines.path}  ({engines.total_bytes / 1e6:,.1f} MB in {len(manifest.files)} files)",
        *_model_lines("target", manifest.target),
        *(_model_lines("draft", manifest.draft) if manifest.draft else ["draft     none"]),
        f"sampling  {', '.join(manifest.sampling)}",
        f"limits    batch {limits.batch}, context {limits.context}, draft length {limits.draft_length}",
        f"ends at   tokens {', '.join(str(token) for token in manifest.tokenizer.end_tokens) or 'none'}",
        f"backend   {manifest.backend.name} on {manifest.backend.device}; exported by forerun {manifest.forerun}",
    ]
    if found is not None:
        lines.append("verified  " + ("every file and graph is as exported" if not found else "; ".join(found)))
        if not found and not shapes_checked:
            lines.append("shapes    not checked (needs forerun[export])")
    return "\n".join(lines)


def _model_lines(role: str, record: ModelRecord) -> list[str]:
    numbers = record.architecture
    left_out = f", layers {', '.join(map(str, record.layers_left_out))} left out" if record.layers_left_out else ""
    lines = [
        f"{role:8}  {record.source} ({record.precision}, {record.frontend}){left_out}",
        f"          {numbers.model_type}: {numbers.layers} layers, {numbers.query_heads} heads over "
        f"{numbers.kv_heads} KV heads of {numbers.head_size}, vocabulary {numbers.vocabulary_size}",
    ]
    if record.is_head:
        layers = ", ".join(map(str, record.feature_layers))
        lines.append(f"          a trained head: it reads the target's features, from behind its layers {layers}")
    if record.head_tokens is not None:
        lines.append(f"          its head gives logits to {record.head_tokens} tokens only")
    if record.parity is not None:
        before = "before quantizing: " if record.quantization is not None else ""
        lines.append(
            f"          {before}logits within {record.parity.max_error:.2g} of {record.parity.reference} "
            f"(bound {record.parity.bound:.2g}, {record.parity.cases} cases)"
        )
    if record.quantization is not None:
        lines.append(f"          {cost_of(record.precision, record.quantization)}")
    return lines


def cost_of(precision: str, cost: Quantization) -> str:
    """What cheaper weights save and cost, in a line."""
    products = ", ".join(f"{count} in {name}" for name, count in cost.products.items())
    return (
        f"{precision} against fp32: {cost.bytes / 1e6:,.0f} MB instead of {cost.bytes_fp32 / 1e6:,.0f}, "
        f"perplexity {cost.perplexity:.2f} instead of {cost.perplexity_fp32:.2f}, "
        f"{cost.greedy_agreement:.1%} of {cost.tokens} most likely tokens the same, "
        f"KL {cost.mean_kl:.2g} (products: {products})"
    )
