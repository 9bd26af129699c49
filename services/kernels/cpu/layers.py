"""MLX layers whose weights are in strips.

They keep a model's graph working where a whole pass is not the kernels' (`decoder`): their inputs
are computed first, as the products are made outside MLX. Their `weight` has no columns: it says
how many outputs there are and takes no memory.
"""

import ctypes
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from services.kernels.cpu.library import view
from services.kernels.cpu.packing import PackedMatrix
from services.kernels.cpu.program import multiply, read_rows


class PackedLinear(nn.Module):
    """x @ weight.T + bias.

    Args:
        parts: whose outputs are side by side.
        program: of an instruction set.
        rounds: whether activations are rounded.
    """

    def __init__(
        self, parts: list[PackedMatrix], program: ctypes.c_void_p, *, rounds: bool
    ) -> None:
        super().__init__()
        self.weight = mx.zeros((sum(part.matrix.outputs for part in parts), 0))
        self.parts = parts
        self.program = program
        self.rounds = rounds

    def __call__(self, x: mx.array) -> mx.array:
        """[..., inputs] -> [..., outputs] of float32."""
        return mx.concatenate([_multiply(self, part, x) for part in self.parts], axis=-1)


class PackedEmbedding(nn.Module):
    """A table of tokens and, where the model has no other one, its head.

    Args:
        packed: [vocabulary, width].
        head: [outputs, width]; the table itself, or some of its rows.
        program: of an instruction set.
        rounds: whether activations are rounded.
    """

    def __init__(
        self, packed: PackedMatrix, head: PackedMatrix, program: ctypes.c_void_p, *, rounds: bool
    ) -> None:
        super().__init__()
        self.weight = mx.zeros((packed.matrix.outputs, 0))
        self.packed = packed
        self.head = head
        self.program = program
        self.rounds = rounds

    def __call__(self, ids: mx.array) -> mx.array:
        """[...] tokens -> [..., width] of float32."""
        mx.eval(ids)
        rows = np.array(ids).reshape(-1).tolist()
        if rows and not 0 <= min(rows) <= max(rows) < self.packed.matrix.outputs:
            raise ValueError(f"tokens outside 0..{self.packed.matrix.outputs - 1}")
        found = read_rows(self.program, self.packed, rows)
        return mx.array(found).reshape(*ids.shape, -1)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., outputs] of x [..., width]."""
        return _multiply(self, self.head, x)


def _multiply(layer: Any, packed: PackedMatrix, x: mx.array) -> mx.array:
    floats = x.astype(mx.float32)
    mx.eval(floats)
    rows = view(floats).reshape(-1, packed.matrix.inputs)
    found = multiply(layer.program, packed, rows, rounds=layer.rounds)
    return mx.array(found).reshape(*x.shape[:-1], packed.matrix.outputs)
