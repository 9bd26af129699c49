"""EAGLE-3: one layer over the embedding of a token and the target's fused states before it.

The head's own residual stream replaces states that do not exist yet.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from protocol.errors import ModelError
from protocol.heads import HeadDescription
from services.drafter.backends.head.layers import HeadAttention, HeadMlp, attention_shape
from services.drafter.backends.head.weights import (
    FOREIGN,
    TargetEnds,
    Tensors,
    fill,
    head_dtype,
    read_tensors,
    trim_ends,
)


class _Layer(nn.Module):
    def __init__(self, head: HeadDescription) -> None:
        super().__init__()
        width, eps = int(head.config["hidden_size"]), float(head.config.get("rms_norm_eps", 1e-6))
        self._embedded = head.target_hidden_size
        self._normed_residual = bool(head.value("norm_before_residual", default=False))
        shape = attention_shape(head, 2 * width, norms=False)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        bias = bool(head.config.get("mlp_bias", False))
        self.mlp = HeadMlp(width, int(head.config["intermediate_size"]), bias=bias)

    def __call__(self, embedded: mx.array, states: mx.array, cache: Any) -> mx.array:
        """Map [1, tokens, width] each to the residual stream."""
        normed = self.hidden_norm(states)
        residual = normed if self._normed_residual else states
        both = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        residual = residual + self.self_attn(both, cache)
        out: mx.array = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3Head(nn.Module):
    """EAGLE-3: one layer that drafts token by token on its own output.

    Raises:
        ModelError: the files are not those of an EAGLE-3 head of one layer.
    """

    def __init__(self, head: HeadDescription, ends: TargetEnds) -> None:
        super().__init__()
        config, width = head.config, int(head.config["hidden_size"])
        eps = float(config.get("rms_norm_eps", 1e-6))
        if int(config.get("num_hidden_layers", 1)) != 1:
            raise ModelError(f"the head {head.folder!r} has more than one layer")
        tensors = _rename(read_tensors(head, "", head_dtype(ends)))
        self.norm_output = bool(head.value("norm_output", default=False))
        self.fc = nn.Linear(len(head.layers) * head.target_hidden_size, width, bias=False)
        if "input_norm.weight" in tensors:
            self.input_norm = nn.RMSNorm(self.fc.weight.shape[1], eps=eps)
        if "fc_norm.0.weight" in tensors:
            self.fc_norm = [nn.RMSNorm(head.target_hidden_size, eps=eps) for _ in head.layers]
        self.midlayer = _Layer(head)
        self.norm = nn.RMSNorm(width, eps=eps)
        if "embed_tokens.weight" not in tensors and width != head.target_hidden_size:
            raise ModelError(f"the head {head.folder!r} has no embedding of its own width, {width}")
        fill(self, {n: a for n, a in tensors.items() if not n.startswith(FOREIGN)}, head)
        self.embed_tokens, self.lm_head, self.head_ids = trim_ends(head, ends, tensors)
        self.head_size = head.vocabulary_size if self.head_ids is None else self.head_ids.size
        self.width = width

    @property
    def normalization(self) -> str:
        """Normalization of the target's states, as in `FeatureRequest`."""
        if "input_norm" in self:
            return "joint"
        return "layer" if "fc_norm" in self else "none"

    def project(self, states: mx.array) -> mx.array:
        """Project normalised [1, tokens, layers * target width] to [1, tokens, width]."""
        if "input_norm" in self:
            states = states * self.input_norm.weight
        elif "fc_norm" in self:
            states = states * mx.concatenate([norm.weight for norm in self.fc_norm])
        out: mx.array = self.fc(states)
        return out

    def __call__(self, tokens: mx.array, states: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Return logits, [1, tokens, head], and a substitute for states, [1, tokens, width]."""
        residual = self.midlayer(self.embed_tokens(tokens), states, cache)
        normed = self.norm(residual)
        return self.lm_head(normed), normed if self.norm_output else residual


def _rename(tensors: Tensors) -> Tensors:
    """Return the tensors under their original names, however they were packaged."""
    renamed: Tensors = {}
    for name, array in tensors.items():
        plain = name.removeprefix("model.")
        if plain.startswith("layers.0."):
            plain = "midlayer." + plain.removeprefix("layers.0.")
        renamed[plain] = array
    return renamed
