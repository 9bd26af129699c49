"""Join products of the same rows, for devices where launches cost as much as the work.

Queries, keys and values are three products of one input, and a gated MLP begins with two. Their
weights are concatenated, so that several rows need one product; each output is the same dot product
as before. On CUDA this shortens a verification of four tokens by a seventh for small targets
(docs/lab/cuda-forward.md). A single row has its own fast kernel and is computed as before, unless
the joint layer says that it `serves` such rows.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _FusedProduct:
    """The joint layer; its latest result is kept until each sibling has taken its part."""

    def __init__(self, layer: Any, borders: list[int]) -> None:
        self.layer = layer
        self._borders = borders
        self._input: mx.array | None = None
        self._parts: dict[int, mx.array] = {}

    def part(self, x: mx.array, index: int) -> mx.array:
        """Return the part of the sibling with this index for `x`."""
        if x is not self._input or index not in self._parts:
            parts = mx.split(self.layer(x), self._borders, axis=-1)
            self._input, self._parts = x, dict(enumerate(parts))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part

    def forget(self) -> None:
        """Drop parts that were not taken."""
        self._input, self._parts = None, {}


class FusedSlice(nn.Module):
    """One of the joined layers; its weights are rows of the joint ones, not a copy."""

    def __init__(self, own: Any, product: _FusedProduct, index: int) -> None:
        super().__init__()
        self.own = own
        self._product = product
        self._index = index

    @property
    def joint(self) -> Any:
        """The joint layer that this is part of."""
        return self._product.layer

    def __call__(self, x: mx.array) -> mx.array:
        """[..., rows, inputs] -> [..., rows, outputs]."""
        if x.shape[-2] == 1 and not self._joins(x):
            self._product.forget()
            alone: mx.array = self.own(x)
            return alone
        return self._product.part(x, self._index)

    def _joins(self, x: mx.array) -> bool:
        serves: Callable[[mx.array], bool] | None = getattr(self.joint, "serves", None)
        return serves is not None and serves(x)


def fuse_linears(model: nn.Module) -> int:
    """Join the products of equal input in every layer of the model; return the number of joints.

    The model's results stay the same. It needs memory for one more layer while it runs.
    """
    joints = 0
    for _, module in model.named_modules():
        for family in _FAMILIES:
            layers = [getattr(module, name, None) for name in family]
            if _is_fusible(layers):
                for name, fused in zip(family, _join(layers), strict=True):
                    setattr(module, name, fused)
                # Joined arrays have sizes that do not recur: do not cache them.
                mx.clear_cache()
                joints += 1
    return joints


def _join(layers: list[Any]) -> Iterator[FusedSlice]:
    joint = copy.copy(layers[0])
    ends = list(itertools.accumulate(layer.weight.shape[0] for layer in layers))
    for name in layers[0].parameters():
        joint[name] = mx.concatenate([layer[name] for layer in layers])
        mx.eval(joint[name])
        for layer, part in zip(layers, mx.split(joint[name], ends[:-1]), strict=True):
            layer[name] = part
            mx.eval(part)
    product = _FusedProduct(joint, ends[:-1])
    for index, layer in enumerate(layers):
        yield FusedSlice(layer, product, index)


def _is_fusible(layers: list[Any]) -> bool:
    """Return True if these are linear layers that differ only in their outputs."""
    kinds = {type(layer) for layer in layers}
    return kinds in ({nn.Linear}, {nn.QuantizedLinear}) and len(set(map(_kind, layers))) == 1


def _kind(layer: Any) -> tuple[str, ...]:
    """Return its parameters by name, type and row, and its quantisation."""
    parameters = sorted((name, a.dtype, a.shape[1:]) for name, a in layer.parameters().items())
    quantisation = [getattr(layer, name, None) for name in ("group_size", "bits", "mode")]
    return (str(parameters), str(quantisation))
