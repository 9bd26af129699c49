"""Products of the same rows, in one: for devices where a launch costs as much as its work.

Queries, keys and values are three products of one input, a gated MLP begins with two. Their
weights are laid one below the other, so that several rows need one product; each output is
the same dot product as before. On CUDA a verification of four tokens is a seventh shorter for
it with small targets (docs/lab/cuda-forward.md). A single row has a quick kernel of its own and is
served as it was, unless the joint layer says that it `serves` such rows.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _FusedProduct:
    """The joint layer; its latest rows are kept until each sibling has taken its part."""

    def __init__(self, layer: Any, borders: list[int]) -> None:
        self.layer = layer
        self._borders = borders
        self._input: mx.array | None = None
        self._parts: dict[int, mx.array] = {}

    def part(self, x: mx.array, index: int) -> mx.array:
        """What the sibling of this index gives for `x`."""
        if x is not self._input or index not in self._parts:
            parts = mx.split(self.layer(x), self._borders, axis=-1)
            self._input, self._parts = x, dict(enumerate(parts))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part

    def forget(self) -> None:
        """Let go of parts that nobody took."""
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
        """The layer that it is a part of."""
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
    """Join the products of equal input in every layer of the model; returns how many joints.

    What the model computes stays the same. Needs the memory of one layer more while it works.
    """
    joints = 0
    for _, module in model.named_modules():
        for family in _FAMILIES:
            layers = [getattr(module, name, None) for name in family]
            if _is_fusible(layers):
                for name, fused in zip(family, _join(layers), strict=True):
                    setattr(module, name, fused)
                # What was joined is of no size that comes again: not to be kept for reuse.
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
    """Whether these are linear layers that differ in their outputs alone."""
    kinds = {type(layer) for layer in layers}
    return kinds in ({nn.Linear}, {nn.QuantizedLinear}) and len(set(map(_kind, layers))) == 1


def _kind(layer: Any) -> tuple[str, ...]:
    """Its parameters by name, type and row, and its quantisation."""
    parameters = sorted((name, a.dtype, a.shape[1:]) for name, a in layer.parameters().items())
    quantisation = [getattr(layer, name, None) for name in ("group_size", "bits", "mode")]
    return (str(parameters), str(quantisation))
