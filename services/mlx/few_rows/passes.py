"""Whole passes over few rows on MLX's CPU backend in one call (`cpu/pass.c`).

Where every block of a model goes through our kernels (`blocks`), its passes over few rows
need neither MLX's graph nor Python between them: tokens go in, logits come out, and keys and
values are written where they are (`kv.resident`). Passes of several sequences, chains and trees
are all the same to it. A model whose layers are read or exchanged falls back to its blocks.

Prompts are passes over few rows, too, one after the other, where weights have copies and the
processor AVX-512, which MKL does not use on every processor that has it.
"""

import ctypes
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from services.kv.cache import KVStore
from services.mlx.array_memory import address, view
from services.mlx.blas import cpu_kernels, find_copy, has_avx512
from services.mlx.exact_copies import large_weights
from services.mlx.few_rows.blocks import MOST_ROWS, BlockKernel, use_blocks
from services.mlx.few_rows.weights import BlockWeights, HeldWeights, Linear, Norm, Unfit
from services.mlx.loader import compute_unit
from services.mlx.plain_blocks import FAMILIES
from services.mlx.rope import Angles, use_tables

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-4
"""Relative, of the logits."""
_BEFORE, _TRIED = 20, 3
"""Tokens before those of the trial, and how many those are."""
PIECE = 48
"""Rows of a prompt's passes. Eight times six, which share what is fetched of a weight."""
_MOST_PARTS = 16
"""Sequences of a pass: as in `cpu/pass.c`."""
_CLASSES: dict[type, type] = {}


class _Decoder(ctypes.Structure):
    """`struct decoder` of `cpu/pass.c`."""

    _fields_ = (
        ("blocks", ctypes.POINTER(BlockWeights)),
        ("count", ctypes.c_int),
        ("embedding", ctypes.c_void_p),
        ("norm", Norm),
        ("head", Linear),
        ("scale", ctypes.c_float),
    )


class _Sequence(ctypes.Structure):
    """`struct sequence` of `cpu/pass.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "visible")),
        ("head", ctypes.c_long),
        *((name, ctypes.c_int) for name in ("start", "rows")),
    )


class PassKernel:
    """A model as the kernels see it.

    Raises:
        Unfit: it is of another kind.
    """

    def __init__(self, model: Any) -> None:
        inner = self._inner = model.model
        self._layers = list(inner.layers)
        self._classes = [type(layer) for layer in self._layers]
        kernels: list[BlockKernel] = [
            kernel for layer in self._layers if (kernel := getattr(layer, "kernels", None))
        ]
        shapes = {kernel.shape for kernel in kernels}
        if len(kernels) < len(self._layers) or len(shapes) != 1:
            raise Unfit("not all of its blocks are computed by our kernels, or they differ")
        self._shape = shapes.pop()
        self._weights = held = HeldWeights()
        embedding = self._embedding = inner.embed_tokens
        lookup = getattr(embedding, "looked_up", embedding)
        if type(lookup) is not nn.Embedding:
            raise Unfit(f"its embedding is a {type(lookup).__name__}")
        self.vocabulary, width = lookup.weight.shape
        head = self._head(model, embedding)
        if width != self._shape.width or head.inputs != width:
            raise Unfit(f"its embedding has {width} numbers a token, its head {head.inputs}")
        self._columns = int(head.outputs)
        self._takes_prompts: bool | None = None
        self._blocks = (BlockWeights * len(kernels))(*(kernel.block for kernel in kernels))
        self._decoder = _Decoder(
            self._blocks, len(kernels), held.pointer(lookup.weight), held.norm(inner, "norm"),
            head, self._shape.scale,
        )  # fmt: skip

    def _head(self, model: Any, embedding: Any) -> Linear:
        if "lm_head" in model:
            return self._weights.linear(model.lm_head)
        rows = getattr(embedding, "head", None)
        weight = embedding.weight if rows is None else rows
        return Linear(self._weights.pointer(weight), None, *weight.shape)

    def stores_of(
        self, model: Any, tokens: mx.array, cache: Any, most: int = MOST_ROWS
    ) -> list[KVStore] | None:
        """The sequences of a pass that is ours, whose tokens are these; None if it is not."""
        if not cache or tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.size > most:
            return None
        stores: list[KVStore] | None = getattr(cache[0], "plain_stores", None)
        ours = (
            stores is not None
            and len(cache) == len(self._layers)
            and sum(store.frame.count for store in stores) == tokens.size
            and mx.default_device() == mx.cpu
            and model.model is self._inner
            and self._inner.embed_tokens is self._embedding
            and [type(layer) for layer in self._layers] == self._classes
        )
        return stores if ours else None

    def takes_prompts(self, model: Any) -> bool:
        """Whether passes over many rows are quicker here: asked when weights have their copies."""
        if self._takes_prompts is None:
            copies = [find_copy(weight) for weight in large_weights(model)]
            self._takes_prompts = bool(copies) and None not in copies and has_avx512()
        return self._takes_prompts

    def run(self, tokens: mx.array, stores: Sequence[KVStore], *, head: bool = True) -> mx.array:
        """Logits [1, n, vocabulary]; without `head` [1, 0, vocabulary]."""
        return self._run(self._check(tokens), stores, head=head)

    def fill(self, tokens: mx.array, stores: Sequence[KVStore]) -> None:
        """Keep keys and values of chains of any length, in passes of up to `PIECE` rows."""
        row, at = self._check(tokens), 0
        frames = [store.frame for store in stores]
        for store in stores:
            store.reside(self._shape.kv_heads, self._shape.size)  # with room for all of them
        for pieces in _cut([frame.count for frame in frames]):
            for index, first, count in pieces:
                stores[index].narrow(frames[index], first, count)
            end = at + sum(count for *_, count in pieces)
            self._run(row[at:end], [stores[index] for index, *_ in pieces], head=False)
            at = end
        for store, frame in zip(stores, frames, strict=True):
            store.narrow(frame, 0, frame.count)

    def _check(self, tokens: mx.array) -> npt.NDArray[np.int32]:
        row = np.ascontiguousarray(view(tokens)[0], np.int32)
        if row.size and not 0 <= row.min() <= row.max() < self.vocabulary:
            raise ValueError(f"tokens outside 0..{self.vocabulary - 1}")
        return row

    def _run(
        self, row: npt.NDArray[np.int32], stores: Sequence[KVStore], *, head: bool
    ) -> mx.array:
        parts, held = self._describe(stores)
        turns = [None] * 3 if (angles := self._angles(stores)) is None else map(address, angles)
        logits = np.empty((1, row.size if head else 0, self._columns), np.float32)
        kernels: Any = cpu_kernels()
        kernels.cpu_pass(
            ctypes.byref(self._decoder), row.size, address(row), *turns, len(parts), parts,
            address(logits) if head else None,
        )  # fmt: skip
        del held
        return mx.array(logits)

    def _angles(self, stores: Sequence[KVStore]) -> Angles | None:
        if self._shape.tables is None:
            return None
        positions = [store.frame.positions[store.frame.start :] for store in stores]
        return self._shape.tables.angles_at(np.concatenate(positions).astype(np.int32))

    def _describe(self, stores: Sequence[KVStore]) -> tuple[Any, list[npt.NDArray[np.bool_]]]:
        """Of each sequence; and masks that must outlive the pass."""
        parts, held = (_Sequence * len(stores))(), list[npt.NDArray[np.bool_]]()
        for part, store in zip(parts, stores, strict=True):
            memory, frame = store.reside(self._shape.kv_heads, self._shape.size), store.frame
            part.keys, part.values = ctypes.addressof(memory.keys), ctypes.addressof(memory.values)
            part.head, part.start, part.rows = memory.head, frame.start, frame.count
            if frame.visible is not None:
                held.append(np.ascontiguousarray(frame.visible))
                part.visible = held[-1].ctypes.data
        return parts, held


def equip_for_cpu(model: nn.Module, *, is_part: bool = False) -> None:
    """Let a model on the CPU compute by what is faster there; elsewhere it does nothing.

    One rank's part keeps MLX's blocks: what ranks exchange is in the graph.
    """
    if compute_unit() == "cpu":
        use_tables(model)
        if not is_part and use_blocks(model):
            use_passes(model)


def use_passes(model: Any) -> bool:
    """Let passes over few rows be one call, if the model is of that kind; after `use_blocks`.

    The weights must stay where they are.
    """
    kind = type(model)
    homes = {f"mlx_lm.models.{family}" for family in FAMILIES}
    if kind.__qualname__ != "Model" or kind.__module__ not in homes:
        return False
    try:
        kernel = PassKernel(model)
    except Unfit as reason:
        _log.info("passes block by block: %s", reason)
        return False
    if not _works(model, kernel):
        return False
    model.few_rows = kernel
    model.__class__ = _class_with_kernel(kind)
    return True


def _cut(counts: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Passes over so many rows of each sequence: which one, from which row on, and how many."""
    pieces: list[tuple[int, int, int]] = []
    room = PIECE
    for index, count in enumerate(counts):
        first = 0
        while first < count:
            taken = min(count - first, room)
            pieces.append((index, first, taken))
            first, room = first + taken, room - taken
            if not room or len(pieces) == _MOST_PARTS:
                yield pieces
                pieces, room = [], PIECE
    if pieces:
        yield pieces


def fill_only(model: Any) -> Any:
    """`model`, called where only keys and values are wanted."""
    kernel: PassKernel | None = getattr(model, "few_rows", None)
    if kernel is None:
        return model

    def fill(tokens: mx.array, cache: Any = None) -> mx.array:
        most = sys.maxsize if kernel.takes_prompts(model) else MOST_ROWS
        stores = kernel.stores_of(model, tokens, cache, most)
        if stores is None or any(store.frame.visible is not None for store in stores):
            found: mx.array = model(tokens, cache=cache)
            return found
        kernel.fill(tokens, stores)
        return mx.zeros((1, 0, kernel.vocabulary))

    return fill


def _class_with_kernel(plain: type) -> type:
    """The subclass whose passes over few rows go through the model's kernel."""
    if plain not in _CLASSES:

        def call(self: Any, inputs: mx.array, cache: Any = None, *more: Any, **named: Any) -> Any:
            kernel: PassKernel = self.few_rows
            stores = None if more or named else kernel.stores_of(self, inputs, cache)
            if stores is not None:
                return kernel.run(inputs, stores)
            return plain.__call__(self, inputs, cache, *more, **named)

        _CLASSES[plain] = type(f"FewRows{plain.__name__}", (plain,), {"__call__": call})
    return _CLASSES[plain]


def _works(model: Any, kernel: PassKernel) -> bool:
    """Whether the call gives what the blocks give, and each row the same bits in any company."""
    tokens = mx.arange(1, 1 + _TRIED)[None] % kernel.vocabulary

    def read_before() -> KVStore:
        store = KVStore([None] * len(model.layers), bucketed=False)
        store.chain(_BEFORE)
        model(mx.arange(_BEFORE)[None] % kernel.vocabulary, cache=store.caches)
        store.evaluate()
        return store

    def run(store: KVStore, part: mx.array) -> mx.array:
        store.chain(part.size)
        return kernel.run(part, [store])

    store = read_before()
    store.chain(_TRIED)
    expected = model(tokens, cache=store.caches)
    found, alone = run(read_before(), tokens), read_before()
    apart = mx.concatenate([run(alone, tokens[:, at : at + 1]) for at in range(_TRIED)], axis=1)
    relative: Any = (mx.linalg.norm(found - expected) / mx.linalg.norm(expected)).item()
    if not relative < _TOLERANCE or not mx.array_equal(apart, found).item():
        _log.warning("passes block by block: a single call is %.2g from them", relative)
        return False
    return True
