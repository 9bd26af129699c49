"""Hands a model to the CPU kernels: packs its weights in strips; `decoder` runs its passes."""

import ctypes
import itertools
import logging
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from services.kernels.cpu.decoder import DecoderKernel, use_decoder
from services.kernels.cpu.families import (
    BlockKind,
    kind_of,
    linears_of,
    parts_of,
    window_sizes,
)
from services.kernels.cpu.layers import PackedEmbedding, PackedLinear
from services.kernels.cpu.packing import (
    MlxWeights,
    PackedMatrix,
    check,
    pack,
    weights_of,
)
from services.kernels.cpu.program import find_program, name_of
from services.mlx.patches import Unfit
from services.mlx.rope import is_steady, use_tables

_log = logging.getLogger(__name__)


def takes(model: Any) -> bool:
    """Return True if the kernels can run this model: a decoder of a known family."""
    return find_program() is not None and _why_not(model) is None


def equip(model: Any, *, rounds: bool = True, bits: int = 0) -> bool:
    """Pack a model's weights in strips, freeing its MLX arrays layer by layer.

    Args:
        model: an mlx-lm model, its weights as in the file.
        rounds: round activations to bytes where weights are quantised.
        bits: if not 0, quantise weights of more bits than these, 4 or 8.

    Returns:
        Whether the kernels compute with it.
    """
    program = find_program()
    reason = "there are no CPU kernels" if program is None else _why_not(model)
    if program is None or reason is not None:
        _log.info("this model is computed by MLX: %s", reason)
        return False
    use_tables(model)
    packer = _Packer(program, rounds=rounds, bits=bits)
    family = kind_of(model)
    packer.pack(model, family)
    model.update(tree_map(_to_float32, model.parameters()))
    mx.eval(model.parameters())
    mx.clear_cache()
    _log.info("weights of %.2f GB for %s", packer.nbytes / 1e9, name_of(program))
    try:
        use_decoder(model, DecoderKernel(model, family, program, rounds=rounds))
    except Unfit as reason:
        _log.info("only products are computed by the CPU kernels: %s", reason)
    return True


def count_packed_bytes(model: nn.Module) -> int:
    """Bytes of strips that a pass over few tokens reads."""
    layers = [layer for _, layer in model.named_modules()]
    linears = [layer for layer in layers if isinstance(layer, PackedLinear)]
    tables = [layer for layer in layers if isinstance(layer, PackedEmbedding)]
    heads = 0 if "lm_head" in model else sum(table.head.nbytes for table in tables)
    return int(sum(part.nbytes for layer in linears for part in layer.parts) + heads)


def count_read_bytes(model: nn.Module) -> int:
    """Return the bytes of weights that a pass over few tokens reads."""
    arrays: Any = tree_flatten(model.parameters())
    return int(sum(array.nbytes for _, array in arrays) + count_packed_bytes(model))


def _to_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def _why_not(model: Any) -> str | None:
    try:
        family = kind_of(model)
        window_sizes(model)
        for block in model.model.layers:
            if not is_steady(block.self_attn.rope):
                return f"a RoPE is a {type(block.self_attn.rope).__name__}"
            for owner, name in linears_of(family, block):
                check(weights_of(owner[name]))
        check(weights_of(_table_of(model.model.embed_tokens)))
        if "lm_head" in model:
            check(weights_of(model.lm_head))
    except Unfit as reason:
        return str(reason)
    return None


def _table_of(embedding: Any) -> Any:
    """The table of an embedding whose head was trimmed (`services.mlx.lm_head`)."""
    return getattr(embedding, "looked_up", embedding)


class _Packer:
    """Replaces the layers of a model by packed ones."""

    def __init__(self, program: ctypes.c_void_p, *, rounds: bool, bits: int) -> None:
        self._program, self._rounds, self._bits = program, rounds, bits
        self.nbytes = 0

    def pack(self, model: Any, family: BlockKind) -> None:
        """Pack all layers of the model."""
        # The largest first, while there is little else in memory.
        if "lm_head" in model:
            model.lm_head = self._linear(model.lm_head, [model.lm_head.weight.shape[0]])
        model.model.embed_tokens = self._embedding(model.model.embed_tokens)
        mx.clear_cache()
        for block in model.model.layers:
            for owner, name in linears_of(family, block):
                outputs = parts_of(name, block, owner[name].weight.shape[0])
                setattr(owner, name, self._linear(owner[name], outputs))

    def _linear(self, layer: Any, outputs: list[int]) -> PackedLinear:
        """Pack a layer as several, with these numbers of outputs."""
        ends = list(itertools.accumulate(outputs))
        bias = layer.bias if "bias" in layer else None
        parts = [
            self._pack(weights_of(layer).cut(first, end), None if bias is None else bias[first:end])
            for first, end in zip([0, *ends], ends, strict=False)
        ]
        return PackedLinear(parts, self._program, rounds=self._rounds)

    def _embedding(self, embedding: Any) -> PackedEmbedding:
        table = self._pack(weights_of(_table_of(embedding)))
        rows = getattr(embedding, "head", None)
        head = table if rows is None else self._pack(MlxWeights(rows))
        return PackedEmbedding(table, head, self._program, rounds=self._rounds)

    def _pack(self, weights: MlxWeights, bias: mx.array | None = None) -> PackedMatrix:
        packed = pack(weights, bias, self._bits)
        self.nbytes += packed.nbytes
        return packed
