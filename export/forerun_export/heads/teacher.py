"""The target as a teacher: its hidden states behind three layers, and its own logits from the last of them."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ExportError
from forerun_export.eager import load_eager, without_layers
from forerun_export.heads.module import DraftHead, epsilon_of, feature_layers, rms
from forerun_export.sources import Source

_TRIED = 8  # tokens
_TOLERANCE = 0.02  # of the largest logit; hidden states have 16 bits


class Teacher:
    """A checkpoint run by transformers, frozen. `device` is where it runs; on a CPU in bfloat16 where asked for.

    Hidden states are kept as rms(f), which the head takes them by anyway: they fit into 16 bits whatever their size.
    Raises ExportError for a target whose logits or layers are made in another way than a head's.
    """

    def __init__(self, source: Source, *, device: str = "cpu") -> None:
        self.model = load_eager(source).to(device).requires_grad_(False)
        self.device = torch.device(device)
        self.epsilon = epsilon_of(self.model)
        self.layers = feature_layers(len(self.model.get_decoder().layers))
        ids = torch.arange(_TRIED, device=self.device)[None]
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
        # The same attention, computed in blocks; only the parity of exports needs the eager one.
        self.model.config._attn_implementation = "sdpa"
        self._try(ids, logits)

    @property
    def hidden_size(self) -> int:
        """h."""
        return int(self.model.config.hidden_size)

    @property
    def embedding(self) -> Tensor:
        """Of every token [V,h]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """W_head [V,h]."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def hidden(self, sequences: Sequence[Sequence[int]], *, bfloat16: bool) -> list[Tensor]:
        """rms of the hidden states [T,3h] in float16, of each sequence of T tokens. They run as one padded batch."""
        outputs = self.outputs(sequences, self.layers, bfloat16=bfloat16)
        hidden = torch.cat([rms(output.float(), self.epsilon) for output in outputs], -1).half().cpu()
        return [row[: len(tokens)] for row, tokens in zip(hidden, sequences, strict=True)]

    @torch.no_grad()
    def outputs(self, sequences: Sequence[Sequence[int]], layers: Sequence[int], *, bfloat16: bool) -> list[Tensor]:
        """What these layers, counted from 1, give [B,T,h] for sequences padded to the longest."""
        longest = max(len(tokens) for tokens in sequences)
        ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in sequences], device=self.device)
        decoder, mixed = self.model.get_decoder(), torch.autocast(self.device.type, torch.bfloat16, enabled=bfloat16)
        with _outputs_of(decoder.layers, layers) as outputs, mixed:
            decoder(input_ids=ids, use_cache=False)
        return outputs

    def final(self, hidden: Tensor) -> Tensor:
        """What the target multiplies with W_head [..,h], of hidden states as `hidden` gives them [..,3h]."""
        weight: Tensor = self.model.get_decoder().norm.weight
        return weight * hidden[..., 2 * self.hidden_size :].float()

    @torch.no_grad()
    def final_without(self, layers: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """What `final` would give for tokens [T], with these layers (from 0) left out [T,h]."""
        ids = torch.tensor([list(tokens)], device=self.device)
        with without_layers(self.model, layers):
            output: Tensor = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
        return output

    @torch.no_grad()
    def _try(self, ids: Tensor, logits: Tensor) -> None:
        """Soft caps, scales, biases and other norms show as other logits; other layers, as inputs that they want."""
        kind = self.model.config.model_type
        (hidden,) = self.hidden(ids.tolist(), bfloat16=False)
        hidden = hidden.to(self.device)
        if (self.final(hidden) @ self.head.T - logits).abs().max() > _TOLERANCE * logits.abs().max():
            raise ExportError(
                f"a {kind} makes its logits in another way than draft heads do; none can be trained for it"
            )
        try:
            head = DraftHead(self.model).to(self.device)
            head.unroll(hidden[None].float(), self.embedding[ids], steps=2)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ExportError(
                f"a {kind}'s layers do not work in a draft head ({reason}); none can be trained"
            ) from error


@contextlib.contextmanager
def _outputs_of(layers: Any, numbers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collects what these layers, counted from 1, give while the context lasts."""
    outputs: list[Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layers[number - 1].register_forward_hook(keep) for number in numbers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
