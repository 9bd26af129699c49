"""A decoder's weights as the CPU kernels see them: the structures of `cpu/block.h`."""

import ctypes
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from services.mlx.array_memory import view


class Unfit(Exception):
    """This is not of the kind that the kernels compute."""


class Norm(ctypes.Structure):
    """`struct norm`."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class Linear(ctypes.Structure):
    """`struct linear`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int) for name in ("outputs", "inputs")),
    )


NORMS = ("before", "q_norm", "k_norm", "after")
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


class BlockWeights(ctypes.Structure):
    """`struct block`."""

    _fields_ = (
        *((name, Norm) for name in NORMS),
        *((name, Linear) for name in LINEARS),
        *((name, ctypes.c_int) for name in ("size", "rotated")),
    )


class HeldWeights:
    """Addresses of weights, which are kept where they are as long as this exists.

    What cannot be used raises Unfit.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []

    def norm(self, owner: Any, name: str) -> Norm:
        """The owner's RMS norm of this name; without one, nothing is normalised."""
        if name not in owner:
            return Norm(None, 0.0)
        norm = owner[name]
        if type(norm) is not nn.RMSNorm:
            raise Unfit(f"{name} is a {type(norm).__name__}")
        return Norm(self.pointer(norm.weight), norm.eps)

    def linear(self, layer: Any) -> Linear:
        """A linear layer."""
        if type(layer) is not nn.Linear:
            raise Unfit(f"a product is a {type(layer).__name__}")
        bias = self.pointer(layer.bias) if "bias" in layer else None
        return Linear(self.pointer(layer.weight), bias, *layer.weight.shape)

    def pointer(self, weight: mx.array) -> int:
        """Where these floats begin."""
        if weight.dtype != mx.float32:
            raise Unfit(f"weights of {weight.dtype}")
        mx.eval(weight)
        floats = view(weight)
        if not floats.flags.c_contiguous:
            raise Unfit("weights that are not contiguous")
        self._held.append(floats)
        return int(floats.ctypes.data)
