"""MTP of the Qwen 3.5 family: one full-attention layer that the target was trained with.

It joins a token's embedding with the target's last state before it, after the final norm.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from protocol.errors import ModelError
from protocol.heads import HeadDescription
from protocol.safetensors import read_header
from services.drafter.backends.head.layers import HeadAttention, HeadMlp, attention_shape
from services.drafter.backends.head.weights import (
    TargetEnds,
    Tensors,
    fill,
    head_dtype,
    read_tensors,
    trim_ends,
)

_SMALL = 0.5
"""Norm weights that are stored minus one are mostly below this, the others above."""


class _Layer(nn.Module):
    def __init__(self, head: HeadDescription) -> None:
        super().__init__()
        width, eps = int(head.config["hidden_size"]), float(head.config.get("rms_norm_eps", 1e-6))
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.self_attn = HeadAttention(attention_shape(head, width, norms=True, gated=True))
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = HeadMlp(width, int(head.config["intermediate_size"]))

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), cache)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MtpHead(nn.Module):
    """Qwen 3.5's layer for multi-token prediction.

    Raises:
        ModelError: the files hold no MTP layer, or one of another kind.
    """

    normalization = "final"

    def __init__(self, head: HeadDescription, ends: TargetEnds) -> None:
        super().__init__()
        width, eps = int(head.config["hidden_size"]), float(head.config.get("rms_norm_eps", 1e-6))
        prefix = next(n for n in head.tensors if "mtp." in n).partition("mtp.")[0] + "mtp."
        tensors = _add_one(read_tensors(head, prefix, head_dtype(ends)), head)
        if any("experts" in name for name in tensors):
            raise ModelError(f"the MTP layer in {head.folder!r} has experts: not supported")
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [_Layer(head)]
        self.norm = nn.RMSNorm(width, eps=eps)
        fill(self, tensors, head)
        self.embed_tokens, self.lm_head, self.head_ids = trim_ends(head, ends, {})
        self.head_size = head.vocabulary_size if self.head_ids is None else int(self.head_ids.size)
        self.width = width

    def project(self, states: mx.array) -> mx.array:
        """Return the states unchanged."""
        return states

    def __call__(self, tokens: mx.array, states: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Return logits, [1, tokens, head], and a substitute for states, [1, tokens, width]."""
        embedded = self.pre_fc_norm_embedding(self.embed_tokens(tokens))
        both = mx.concatenate([embedded, self.pre_fc_norm_hidden(states)], axis=-1)
        normed = self.norm(self.layers[0](self.fc(both), cache))
        return self.lm_head(normed), normed


def _add_one(tensors: Tensors, head: HeadDescription) -> Tensors:
    """Return the weights of the norms as they are used: Qwen stores them minus one."""
    if not _is_less_one(tensors, head):
        return tensors
    return {n: a + 1.0 if "norm" in n and a.ndim == 1 else a for n, a in tensors.items()}


def _is_less_one(tensors: Tensors, head: HeadDescription) -> bool:
    """Return True if weights are stored minus one, as the model, file or values show."""
    convolution = next((s for n, s in head.tensors.items() if "conv1d.weight" in n), None)
    if convolution is not None:
        return convolution[-1] != 1  # as in mlx-lm's check for converted models
    header = read_header(Path(next(iter(head.files.values()))))
    said = (header.get("__metadata__") or {}).get("format")
    if said in ("mlx", "pt"):
        return bool(said == "pt")
    norms = [np.array(a.astype(mx.float32)) for n, a in tensors.items() if "norm" in n]
    return bool(np.median(np.concatenate(norms)) < _SMALL)
