"""The draft head in PyTorch: what is trained, and what exported graphs are compared with.

t counts positions of the sequence. Entry t of the head reads the target's hidden states of token t, behind three of its
layers, and the embedding of token t+1; it predicts token t+2. With h the target's hidden size:

    g_t = fuse . concat(rms(f_low), rms(f_mid), rms(f_last))                              rms: without a weight
    x_t = join . concat(embedding_norm(e_{t+1}), feature_norm(g_t))
    a_t = layer(x_t), rotary position t, causal over entries 0 .. t
    logits_t = W_head . norm(a_t)                                                         the target's own W_head

Drafting goes on with the head's own output: entry t+1 takes a_t in the place of g_{t+1}. It is EAGLE-3's shape
(Li et al. 2503.01840): no loss on features, and training on the head's own outputs for several steps.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ExportError


def rms(x: Tensor, epsilon: float) -> Tensor:
    """x [..,n] over its root mean square, computed in float32 at the least."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


class Norm(nn.Module):
    """RMSNorm over the last axis, with a weight [h]."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x [..,h] normalised."""
        return self.weight * rms(x, self.epsilon)


class DraftHead(nn.Module):
    """One decoder layer of the target's kind behind a fusion of features; begins as the target's last layer.

    `target` is a causal language model of transformers. Its embedding and head stay its own: callers pass embeddings
    in and take hidden states out.
    """

    def __init__(self, target: Any) -> None:
        super().__init__()
        decoder = target.get_decoder()
        self.epsilon = epsilon_of(target)
        h = int(target.config.hidden_size)
        last = decoder.layers[-1]
        self.fuse = nn.Linear(3 * h, h, bias=False)
        self.embedding_norm = Norm(torch.ones(h), self.epsilon)
        self.feature_norm = Norm(torch.ones(h), self.epsilon)
        self.join = nn.Linear(2 * h, h, bias=False)
        self.layer = copy.deepcopy(last)
        self.norm = Norm(decoder.norm.weight.detach().float(), self.epsilon)
        self.layer.self_attn.layer_idx = 0  # of its own cache
        self.layer.requires_grad_(True)
        # Not a part of the head's weights: it is a function of the target's configuration.
        self._rotary = [decoder.rotary_emb]
        with torch.no_grad():  # the feature begins as the last hidden state, and the join as the sum of its sides
            self.fuse.weight.copy_(torch.eye(h).repeat(1, 3) * torch.tensor([0.0, 0.0, 1.0]).repeat_interleave(h))
            self.join.weight.copy_(torch.eye(h).repeat(1, 2))

    def feature(self, hidden: Tensor) -> Tensor:
        """g [B,T,h] of the target's hidden states [B,T,3h]: behind the low, the middle and the last layer."""
        parts = hidden.reshape(*hidden.shape[:-1], 3, -1)
        return self.fuse(rms(parts, self.epsilon).flatten(-2))  # type: ignore[no-any-return]

    def forward(self, feature: Tensor, embeddings: Tensor, cache: "ChainCache", mask: Tensor, at: Tensor) -> Tensor:
        """Hidden states a [B,T,h] of T entries.

        `feature` [B,T,h] is g, or a of the entry before; `embeddings` [B,T,h] those of the tokens behind the entries;
        `mask` [B or 1,1,T,M+T] says which of the cache's M entries and of these T each of them sees; `at` [B or 1,T]
        the entries' rotary positions. The cache takes the new entries.
        """
        x = self.join(torch.cat((self.embedding_norm(embeddings), self.feature_norm(feature)), -1))
        lowest = torch.finfo(x.dtype).min
        additive = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, lowest)
        output = self.layer(
            x,
            attention_mask=additive,
            position_ids=at,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=self._rotary[0](x, at),
        )
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def unroll(self, hidden: Tensor, embeddings: Tensor, *, steps: int, first: int = 1) -> list[Tensor]:
        """Hidden states of each of `steps` drafting steps, for the entries of whole sequences at once.

        `hidden` [B,T,3h] of the target; `embeddings` [B,T,h], of token t+1 at entry t. Step 0 gives all entries
        [B,T,h], the others those from `first` (at least 1) on: [B,T-first,h].

        Entry t of step s is what the head gives there when its last feature of the target's is that of entry t - s.
        It sees the entries with true features up to t - s, and of each step between, the one entry of its own chain.
        Entries before first - 1 + s have no chain; what stands there means nothing.
        """
        entries = hidden.shape[1]
        at = torch.arange(entries, device=hidden.device)[None]
        cache, outputs = ChainCache(), list[Tensor]()
        feature = self.feature(hidden)
        for step in range(steps):
            mask = chain_mask(entries, step, first=first, device=hidden.device)
            since = first if step else 0
            outputs.append(self(feature, embeddings[:, since:], cache, mask, at[:, since:]))
            before = (outputs[-1][:, :1], outputs[-1][:, :-1]) if step else (outputs[-1][:, first - 1 : -1],)
            feature = torch.cat(before, 1)
        return outputs


def chain_mask(entries: int, step: int, *, first: int = 1, device: torch.device | None = None) -> Tensor:
    """Which keys each entry of a step sees [1,1,Q,T+step*(T-first)]: T of step 0, then T - first of each step.

    Step 0 has T entries and its T keys; the others have the T - first entries from `first` on.
    """
    query = torch.arange(first if step else 0, entries, device=device)[:, None]
    every, later = (torch.arange(start, entries, device=device)[None] for start in (0, first))
    chain = [later == query - step + between for between in range(1, step + 1)]
    mask = torch.cat((every <= query - step, *chain), 1)
    mask[:, 0] |= ~mask.any(1)  # an entry without a chain: a row that sees nothing would be NaN
    return mask[None, None]


class ChainCache:
    """Keys and values of all entries so far, in the order in which they were given.

    The one verb of transformers' caches that attention layers call; gradients pass through it.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B,H,T,D] and give all of them."""
        self.keys = keys if self.keys is None else torch.cat((self.keys, keys), 2)
        self.values = values if self.values is None else torch.cat((self.values, values), 2)
        return self.keys, self.values


def feature_layers(layers: int) -> tuple[int, int, int]:
    """A low, a middle and the last layer of so many, counted from 1. Raises ExportError for fewer than three."""
    if layers < 3:
        raise ExportError(f"the target has {layers} layers; a draft head reads three of them")
    low = max(1, layers // 10)
    return low, max(low + 1, layers // 2), layers


def epsilon_of(target: Any) -> float:
    """The epsilon of the target's norms. Raises ExportError if it does not end in layers and an RMSNorm."""
    decoder, kind = target.get_decoder(), target.config.model_type
    norm = getattr(decoder, "norm", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not hasattr(decoder, "layers") or epsilon is None or getattr(norm, "bias", None) is not None:
        raise ExportError(
            f"a {kind} does not end in decoder layers and an RMSNorm; no draft head can be trained for it"
        )
    return float(epsilon)


def load_weights(head: DraftHead, tensors: Any) -> None:
    """Take a head folder's tensors. Raises ExportError, naming one, if they are not this target's head's."""
    own = head.state_dict()
    given = {name: torch.as_tensor(array) for name, array in tensors.items() if name != "tokens"}
    shapes = {name: tensor.shape for name, tensor in own.items()}
    wrong = [name for name in {**own, **given} if name not in given or shapes.get(name) != given[name].shape]
    if wrong:
        raise ExportError(f"the head's {sorted(wrong)[0]} does not fit its target; it was trained for another model")
    head.load_state_dict({name: tensor.float() for name, tensor in given.items()})
