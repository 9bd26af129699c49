"""The layers of heads."""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.rope_utils import initialize_rope

from protocol.heads import HeadDescription


class AttentionShape(NamedTuple):
    """Shape of an attention layer."""

    inputs: int
    """Width of the input to queries, keys and values."""
    outputs: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    norms: bool
    """True if queries and keys are normalised, head by head."""
    gated: bool
    """True if the queries' projection includes a gate for the output."""
    eps: float
    rope: Any


def attention_shape(
    head: HeadDescription, inputs: int, *, norms: bool, gated: bool = False
) -> AttentionShape:
    """Return the shape that a head's config describes."""
    config = head.config
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    size = int(config.get("head_dim") or hidden // heads)
    rope: dict[str, Any] = dict(config.get("rope_parameters") or {})
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    scaling = config.get("rope_scaling") or (rope if kind != "default" else None)
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return AttentionShape(
        inputs=inputs,
        outputs=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=size,
        bias=bool(config.get("attention_bias", False)),
        norms=norms,
        gated=gated,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=initialize_rope(
            int(size * float(share)),
            base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            traditional=False,
            scaling_config=scaling,
            max_position_embeddings=config.get("max_position_embeddings"),
        ),
    )


class HeadAttention(nn.Module):
    """Attention over a `SlotCache`, or over given keys and values."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self._shape = shape
        width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        queries = 2 * width if shape.gated else width
        self.q_proj = nn.Linear(shape.inputs, queries, bias=shape.bias)
        self.k_proj = nn.Linear(shape.inputs, kv, bias=shape.bias)
        self.v_proj = nn.Linear(shape.inputs, kv, bias=shape.bias)
        self.o_proj = nn.Linear(width, shape.outputs, bias=shape.bias)
        if shape.norms:
            self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)
            self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)
        self.rope = shape.rope

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        """Map [1, tokens, inputs] to [1, tokens, outputs]; keys and values go to the cache."""
        queries, gate = self._queries(x, cache.offset)
        keys, values = cache.update_and_fetch(*self.keys_and_values(x, cache.offset))
        mask = cache.make_mask(x.shape[1])
        return self._attend(queries, keys, values, mask, gate)

    def attend_to(
        self, x: mx.array, offset: int, context: tuple[mx.array, mx.array] | None, mask: Any
    ) -> mx.array:
        """Attend to context and block: [blocks, tokens, inputs] to [blocks, tokens, outputs].

        Args:
            x: blocks that all start at the same position.
            offset: that position.
            context: keys and values [1, heads, slots, size] that all blocks share, if any.
            mask: [blocks * tokens, slots + blocks * tokens] visibility for each row, or None.
        """
        queries, gate = self._queries(x, offset)
        keys, values = (_flatten(part) for part in self.keys_and_values(x, offset))
        if context is not None:
            keys = mx.concatenate([context[0], keys], axis=2)
            values = mx.concatenate([context[1], values], axis=2)
        out = self._attend(_flatten(queries), keys, values, mask, gate)
        return out.reshape(*x.shape[:2], -1)

    def keys_and_values(self, x: mx.array, offset: Any) -> tuple[mx.array, mx.array]:
        """Return [rows, kv heads, tokens, size] each, the keys rotated."""
        shape = self._shape
        keys = _by_head(self.k_proj(x), shape.kv_heads)
        values = _by_head(self.v_proj(x), shape.kv_heads).swapaxes(1, 2)
        if shape.norms:
            keys = self.k_norm(keys)
        return self.rope(keys.swapaxes(1, 2), offset=offset), values

    def _queries(self, x: mx.array, offset: Any) -> tuple[mx.array, mx.array | None]:
        shape = self._shape
        queries, gate = _by_head(self.q_proj(x), shape.heads), None
        if shape.gated:
            queries, gate = mx.split(queries, 2, axis=-1)
        if shape.norms:
            queries = self.q_norm(queries)
        return self.rope(queries.swapaxes(1, 2), offset=offset), gate

    def _attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any, gate: mx.array | None
    ) -> mx.array:
        scale = self._shape.head_dim**-0.5
        out = scaled_dot_product_attention(
            queries, keys, values, cache=None, scale=scale, mask=mask
        )
        rows = out.swapaxes(1, 2).reshape(out.shape[0], out.shape[2], -1)
        if gate is not None:
            rows = rows * mx.sigmoid(gate.reshape(rows.shape))
        projected: mx.array = self.o_proj(rows)
        return projected


def _flatten(x: mx.array) -> mx.array:
    """Reshape [blocks, heads, tokens, size] to [1, heads, blocks * tokens, size]."""
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[3])


def _by_head(x: mx.array, heads: int) -> mx.array:
    return x.reshape(*x.shape[:2], heads, -1)


class HeadMlp(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [..., width] to [..., width]."""
        out: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
