"""A drafter in training: a few narrow layers of a Llama or Qwen 2, from the target's own.

As in `services/distill/student.py`: the first and the last layers, of each MLP the hidden columns
of largest norm; embedding and head are the target's and frozen.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as fn
from packed import rounded
from plain import turn

_PARTS = ("input_layernorm", "post_attention_layernorm")
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

Weights = dict[str, torch.Tensor]


class Student:
    """The drafter; its weights are in float32 and computed with in the target's type."""

    def __init__(
        self,
        config: dict[str, Any],
        target: Weights,
        shape: tuple[int, int],
        head: torch.Tensor,
        init: Weights | None = None,
    ) -> None:
        self.layers, self.mlp = shape
        self._embedding = target["model.embed_tokens.weight"]
        self._head = target.get("lm_head.weight", self._embedding)[head].clone()
        self.device, self._dtype = self._embedding.device, self._embedding.dtype
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self._width: int = config["hidden_size"]
        self._size: int = config.get("head_dim") or self._width // self.heads
        self._epsilon: float = config["rms_norm_eps"]
        self._weights = _inherit(target, config["num_hidden_layers"], shape)
        for name, weight in (init or {}).items():
            self._weights[name].copy_(weight)
        for weight in self._weights.values():
            weight.requires_grad_()
        half = torch.arange(0, self._size, 2, device=self.device, dtype=torch.float32) / self._size
        places = torch.arange(8192, device=self.device, dtype=torch.float32)
        angles = torch.outer(places, config["rope_theta"] ** -half)
        self._turns = angles.cos(), angles.sin()
        self.rounds = False
        """Whether it computes with what 4 bits keep of its matrices."""

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(weight.numel() for weight in self._weights.values())

    def parameters(self) -> list[torch.Tensor]:
        """Return all weights."""
        return list(self._weights.values())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each weight under mlx-lm's name."""
        for name, weight in self._weights.items():
            yield name, weight.detach()

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [count, head] logits at flat positions of tokens [rows, length]."""
        x = fn.embedding(tokens, self._embedding)
        cos, sin = (part[: tokens.shape[1]] for part in self._turns)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            block = {
                name.removeprefix(prefix): self._cast(weight)
                for name, weight in self._weights.items()
                if name.startswith(prefix)
            }
            x = self._run(x, block, cos, sin)
        norm = self._cast(self._weights["model.norm.weight"])
        x = x.flatten(0, 1)[positions]
        return fn.linear(fn.rms_norm(x, (self._width,), norm, self._epsilon), self._head)

    def _cast(self, weight: torch.Tensor) -> torch.Tensor:
        weight = rounded(weight) if self.rounds and weight.ndim == 2 else weight
        return weight.to(self._dtype)

    def _run(
        self, x: torch.Tensor, block: Weights, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Run one layer over [rows, length, width]."""
        rows, length, _ = x.shape
        h = fn.rms_norm(x, (self._width,), block["input_layernorm.weight"], self._epsilon)
        q, k, v = (
            fn.linear(h, block[f"{name}.weight"], block.get(f"{name}.bias"))
            .view(rows, length, -1, self._size)
            .transpose(1, 2)
            for name in _PROJECTIONS[:3]
        )
        out = fn.scaled_dot_product_attention(
            turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + fn.linear(out.transpose(1, 2).flatten(2), block["self_attn.o_proj.weight"])
        h = fn.rms_norm(x, (self._width,), block["post_attention_layernorm.weight"], self._epsilon)
        gate, up, down = (block[f"{name}.weight"] for name in _MLP)
        return x + fn.linear(fn.silu(fn.linear(h, gate)) * fn.linear(h, up), down)


def _inherit(target: Weights, total: int, shape: tuple[int, int]) -> Weights:
    """Copy the first and the last layers under their new numbers, in float32."""
    count, mlp = shape
    first = (count + 1) // 2
    chosen = [*range(first), *range(total - (count - first), total)]
    weights = {"model.norm.weight": target["model.norm.weight"].float().clone()}
    for new, old in enumerate(chosen):
        prefix = f"model.layers.{old}."
        layer = {
            name.removeprefix(prefix): weight.float().clone()
            for name, weight in target.items()
            if name.startswith(prefix)
        }
        gate, up, down = (f"{name}.weight" for name in _MLP)
        norm = layer[gate].norm(dim=1) * layer[up].norm(dim=1) * layer[down].norm(dim=0)
        kept = norm.topk(mlp).indices.sort().values
        layer |= {gate: layer[gate][kept], up: layer[up][kept], down: layer[down][:, kept]}
        weights |= {f"model.layers.{new}.{name}": w.contiguous() for name, w in layer.items()}
    return weights
