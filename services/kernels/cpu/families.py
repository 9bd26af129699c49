"""The families of decoders that the CPU kernels compute, named as in mlx-lm.

A block is x + attended(attention(before(x))), then x + fed(MLP(after(x))). Any of these four norms
may be missing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from services.mlx.loader import windows_of
from services.mlx.patches import Unfit
from services.mlx.rope import BranchRope, TableRope, Tables

_PLAIN_NORMS = {"before": "input_layernorm", "after": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "before": "input_layernorm",
    "attended": "post_attention_layernorm",
    "after": "pre_feedforward_layernorm",
    "fed": "post_feedforward_layernorm",
}
_MOST_ROTATIONS = 2


@dataclass(frozen=True)
class BlockKind:
    """The steps of a family's blocks beyond products, rotation and attention."""

    norms: Mapping[str, str] = field(default_factory=lambda: _PLAIN_NORMS)
    """Name of a norm in `struct block` -> name of its module in mlx-lm."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    gelu: bool = False
    scales_embedding: mx.Dtype | None = None
    """If set, embeddings are multiplied by the root of their width, rounded to this type."""
    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    mlp: tuple[str, ...] = ("gate_proj", "up_proj")


_GEMMA2 = BlockKind(_GEMMA_NORMS, 1.0, gelu=True, scales_embedding=mx.float32)
_FAMILIES = {
    "llama": BlockKind(),
    "qwen2": BlockKind(),
    "qwen3": BlockKind(),
    "gemma2": _GEMMA2,
    "gemma3_text": BlockKind(_GEMMA_NORMS, 1.0, gelu=True, scales_embedding=mx.bfloat16),
    "phi3": BlockKind(attention=("qkv_proj",), mlp=("gate_up_proj",)),
}


def kind_of(model: Any) -> BlockKind:
    """Return the family of an mlx-lm model whose blocks are unmodified.

    Raises:
        Unfit: it is of another family, or modified.
    """
    kind = type(model)
    home, _, name = kind.__module__.rpartition(".")
    if home != "mlx_lm.models" or kind.__qualname__ != "Model" or name not in _FAMILIES:
        raise Unfit(f"its class is {kind.__module__}.{kind.__qualname__}")
    for block in model.model.layers:
        parts = [type(part) for part in (block, block.self_attn, block.mlp)]
        names = [part.__qualname__ for part in parts]
        modules = {part.__module__ for part in parts}
        if names != ["TransformerBlock", "Attention", "MLP"] or modules != {kind.__module__}:
            raise Unfit(f"a block is a {type(block).__name__}")
    return _FAMILIES[name]


def linears_of(family: BlockKind, block: Any) -> Iterator[tuple[Any, str]]:
    """Yield the owner and the name of each linear layer of a block."""
    yield from ((block.self_attn, name) for name in (*family.attention, "o_proj"))
    yield from ((block.mlp, name) for name in (*family.mlp, "down_proj"))


def parts_of(name: str, block: Any, outputs: int) -> list[int]:
    """Return the number of outputs of each layer that is fused into this one."""
    attention = block.self_attn
    if name == "qkv_proj":
        heads, kv_heads = attention.n_heads, attention.n_kv_heads
        size = outputs // (heads + 2 * kv_heads)
        return [heads * size, kv_heads * size, kv_heads * size]
    return [outputs // 2] * 2 if name == "gate_up_proj" else [outputs]


def embedding_scale(family: BlockKind, width: int) -> float:
    """Return the factor by which embeddings are multiplied."""
    if family.scales_embedding is None:
        return 1.0
    return float(np.array(mx.array(width**0.5).astype(family.scales_embedding).astype(mx.float32)))


def caps_of(model: Any) -> tuple[float, float]:
    """Return the soft caps of attention's scores and of logits; 0 where there are none."""
    scores = getattr(model.model.layers[0].self_attn, "attn_logit_softcapping", None)
    logits = getattr(model, "final_logit_softcapping", None)
    return float(scores or 0.0), float(logits or 0.0)


def window_sizes(model: Any) -> list[int]:
    """Return each layer's attention window, 0 for none.

    Raises:
        Unfit: there are several sizes.
    """
    windows = [window or 0 for window in windows_of(model)]
    if len(set(windows) - {0}) > 1:
        raise Unfit("layers have windows of different sizes")
    return windows


@dataclass(frozen=True)
class Rotations:
    """How the layers of a model rotate queries and keys."""

    tables: list[Tables]
    """One for each distinct RoPE; empty if the model has none."""
    dims: int
    """Number of rotated elements in a head."""
    of_layer: list[int]
    """Index of each layer's table."""


def rotations_of(layers: list[Any]) -> Rotations:
    """Return the RoPE tables of these layers.

    Raises:
        Unfit: their RoPE is of an unknown kind, or of too many kinds.
    """
    ropes = [layer.self_attn.rope for layer in layers]
    ropes = [rope.own if isinstance(rope, BranchRope) else rope for rope in ropes]
    if all(type(rope).__name__ == "NoPE" for rope in ropes):
        return Rotations([], 0, [0] * len(ropes))
    tables: list[Tables] = []
    for rope in ropes:
        if not isinstance(rope, TableRope) or not rope.tables.are_steady:
            raise Unfit(f"a RoPE is a {type(rope).__name__}")
        if rope.tables not in tables:
            tables.append(rope.tables)
    if len(tables) > _MOST_ROTATIONS or len({rope.dims for rope in ropes}) > 1:
        raise Unfit("layers rotate in too many ways")
    return Rotations(tables, ropes[0].dims, [tables.index(rope.tables) for rope in ropes])
