"""Whole passes of a decoder on a CPU in one call (`c/pass.h`).

Tokens go in, logits come out, and keys and values are written where they are (`kv.pool`), with
neither MLX's graph nor Python between the layers. Passes over one token or many, of one sequence or
several, chains and trees are the same to it: a row has the same bits in all of them.
"""

import ctypes
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from services.kernels.cpu import structures
from services.kernels.cpu.families import (
    BlockKind,
    caps_of,
    embedding_scale,
    linears_of,
    rotations_of,
    window_sizes,
)
from services.kernels.cpu.layers import PackedEmbedding
from services.kernels.cpu.library import address, cpu_kernels, view
from services.kernels.cpu.structures import (
    NORMS,
    BlockStruct,
    DecoderStruct,
    NormStruct,
    PassStruct,
)
from services.mlx.patches import Patch, Unfit, install

if TYPE_CHECKING:
    from services.engine.batch import Span
    from services.kv.cache import KVStore
    from services.kv.pool import ResidentSlots

_PIECE = 128
"""Rows of a prompt's passes: their bytes stay in the cache while a strip passes."""
_MOST_PARTS = 64
"""Sequences of a pass: as in `c/pass.h`."""
_TYPES = {structures.HALF: mx.float16, structures.FLOAT: mx.float32}


class DecoderKernel:
    """A model of packed layers as the kernels see it.

    Raises:
        Unfit: its parts are of another kind.
    """

    def __init__(
        self, model: Any, family: BlockKind, program: ctypes.c_void_p, *, rounds: bool
    ) -> None:
        inner = self._inner = model.model
        self._family = family
        self._program = program
        self._layers = list(inner.layers)
        self._kinds = [type(layer) for layer in self._layers]
        self._held: list[Any] = []
        attention = inner.layers[0].self_attn
        self._heads, self.kv_heads = attention.n_heads, attention.n_kv_heads
        self._windows = window_sizes(model)
        self._rotations = rotations_of(self._layers)
        self._angles: list[list[npt.NDArray[np.float32]]] = []
        self._turned = 0
        """Positions that the angles cover."""
        kinds = zip(self._layers, self._rotations.of_layer, self._windows, strict=True)
        blocks = (BlockStruct * len(self._layers))(*(self._block(*kind) for kind in kinds))
        if len({(block.q.outputs, block.gate.outputs) for block in blocks}) > 1:
            raise Unfit("layers have different widths")
        # Keys and values are rounded only where activations or weights are.
        is_exact = not rounds or blocks[0].q.weights == structures.FLOAT
        self._number = structures.FLOAT if is_exact else structures.HALF
        self.size = blocks[0].q.outputs // self._heads
        embedding: PackedEmbedding = inner.embed_tokens
        self._embedding = embedding
        [head] = model.lm_head.parts if "lm_head" in model else [embedding.head]
        self.vocabulary = int(embedding.packed.matrix.outputs)
        self._width = int(embedding.packed.matrix.inputs)
        self._columns = int(head.matrix.outputs)
        self.decoder = DecoderStruct(
            blocks, len(blocks), self._heads, self.kv_heads, self.size, self._rotations.dims,
            int(rounds), int(family.gelu), attention.scale, *caps_of(model),
            embedding_scale(family, self._width),
            embedding.packed.matrix, self._norm(inner, "norm"), head.matrix,
        )  # fmt: skip

    def _block(self, block: Any, rotation: int, window: int) -> BlockStruct:
        attention = block.self_attn
        if (attention.n_heads, attention.n_kv_heads) != (self._heads, self.kv_heads):
            raise Unfit("layers have different numbers of heads")
        places = {name: (block, module) for name, module in self._family.norms.items()}
        places |= {name: (attention, name) for name in ("q_norm", "k_norm")}
        norms = {name: self._norm(*places.get(name, ({}, name))) for name in NORMS}
        parts = [
            part for owner, name in linears_of(self._family, block) for part in owner[name].parts
        ]
        products = zip(structures.PRODUCTS, parts, strict=True)
        matrices = {name: part.matrix for name, part in products}
        return BlockStruct(**norms, **matrices, rotation=rotation, window=window)

    def _norm(self, owner: Any, name: str) -> NormStruct:
        if name not in owner:
            return NormStruct(None, 0.0)
        norm = owner[name]
        if type(norm).__name__ != "RMSNorm":
            raise Unfit(f"{name} is a {type(norm).__name__}")
        floats = np.array(norm.weight.astype(mx.float32)) + np.float32(self._family.norm_offset)
        self._held.append(floats)
        return NormStruct(floats.ctypes.data, norm.eps)

    def stores_of(self, model: Any, tokens: mx.array, cache: Any) -> "list[KVStore] | None":
        """The sequences of a pass that is ours, whose tokens are these; None if it is not."""
        if not cache or tokens.ndim != 2 or tokens.shape[0] != 1:
            return None
        stores: list[KVStore] | None = getattr(cache[0], "plain_stores", None)
        if stores is None or len(stores) > _MOST_PARTS:
            return None
        rows = 0
        for store in stores:
            if store.windows != self._windows:
                return None
            rows += store.span.count
        ours = (
            rows == tokens.size
            and mx.default_device() == mx.cpu
            and model.model is self._inner
            and self._inner.embed_tokens is self._embedding
            and self._is_unchanged()
        )
        return stores if ours else None

    def _is_unchanged(self) -> bool:
        """Whether the layers are what they were, or read (`services.mlx.taps`)."""
        return list(map(type, self._layers)) == self._kinds or all(
            type(layer) is kind or (tap is not None and tap.instead is None)
            for layer, kind in zip(self._layers, self._kinds, strict=True)
            for tap in (getattr(layer, "tap", None),)
        )

    def run(self, tokens: mx.array, stores: "Sequence[KVStore]") -> mx.array:
        """Logits [1, n, vocabulary]."""
        logits, states = self._run(self._check(tokens), stores, head=True)
        if len(states):
            self._catch([states])
        return mx.array(logits)

    def fill(self, tokens: mx.array, stores: "Sequence[KVStore]") -> None:
        """Keep keys and values of chains of any length, in passes of up to `_PIECE` rows."""
        row, at = self._check(tokens), 0
        spans = [store.span for store in stores]
        for store in stores:
            self._reside(store)  # with room for all of them
        caught = []
        for pieces in _cut([span.count for span in spans]):
            for index, first, count in pieces:
                stores[index].place(spans[index].part(first, count))
            end = at + sum(count for *_, count in pieces)
            parts = [stores[index] for index, *_ in pieces]
            caught.append(self._run(row[at:end], parts, head=False)[1])
            at = end
        self._catch(caught)
        for store, span in zip(stores, spans, strict=True):
            store.place(span)

    def _check(self, tokens: mx.array) -> npt.NDArray[np.int32]:
        row = np.ascontiguousarray(view(tokens)[0], np.int32)
        if row.size and not 0 <= row.min() <= row.max() < self.vocabulary:
            raise ValueError(f"tokens outside 0..{self.vocabulary - 1}")
        return row

    @property
    def _tapped(self) -> list[int]:
        """Layers that are read; they are of classes of their own."""
        if list(map(type, self._layers)) == self._kinds:
            return []
        return [at for at, layer in enumerate(self._layers) if hasattr(layer, "tap")]

    def _catch(self, pieces: Sequence[npt.NDArray[np.float32]]) -> None:
        """Hand [tapped, rows, width] of a pass's pieces to whoever reads these layers."""
        for index, layer in enumerate(self._tapped):
            rows = np.concatenate([piece[index] for piece in pieces])
            self._layers[layer].tap.caught = mx.array(rows)[None]

    def _run(
        self, row: npt.NDArray[np.int32], stores: "Sequence[KVStore]", *, head: bool
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Logits [1, n, vocabulary], of no rows without `head`, and [tapped, n, width] states."""
        parts, held = self._describe(stores)
        tapped = self._tapped
        states = np.empty((len(tapped), row.size, self._width), np.float32)
        logits = np.empty((1, row.size if head else 0, self._columns), np.float32)
        positions = np.concatenate([store.span.own_positions for store in stores]).astype(np.int32)
        cos, sin = (ctypes.c_void_p * 2)(), (ctypes.c_void_p * 2)()
        count = int(positions.max(initial=0)) + 1
        if count > self._turned:
            self._angles = [table.angles(count) for table in self._rotations.tables]
            self._turned = min((len(one) for one, _ in self._angles), default=sys.maxsize)
        for at, turns in enumerate(self._angles):
            cos[at], sin[at] = map(address, turns)
        numbers = (ctypes.c_int * len(tapped))(*tapped)
        places = (ctypes.c_void_p * len(tapped))(*[own.ctypes.data for own in states])
        one = PassStruct(
            row.size, address(row), address(positions), cos, sin,
            len(parts), ctypes.addressof(parts),
            address(logits) if head else None,
            len(tapped), ctypes.addressof(numbers), ctypes.addressof(places),
        )  # fmt: skip
        library: Any = cpu_kernels()
        library.cpu_run_pass(self._program, ctypes.byref(self.decoder), ctypes.byref(one))
        del held
        return logits, states

    def _describe(self, stores: "Sequence[KVStore]") -> tuple[Any, list[Any]]:
        """Of each sequence; and masks that must outlive the pass."""
        parts, held = (structures.SequenceStruct * len(stores))(), list[Any]()
        for part, store in zip(parts, stores, strict=True):
            memory, span = self._reside(store), store.span
            part.keys, part.values = ctypes.addressof(memory.keys), ctypes.addressof(memory.values)
            part.number = self._number
            part.head, part.start, part.rows = memory.head, span.start, span.count
            if span.visible is not None:
                masks = [np.ascontiguousarray(mask) for mask in self._masks(span)]
                part.visible = (ctypes.c_void_p * 2)(*(mask.ctypes.data for mask in masks))
                held += masks
        return parts, held

    def _reside(self, store: "KVStore") -> "ResidentSlots":
        return store.reside(self.kv_heads, self.size, _TYPES[self._number])

    def _masks(self, span: "Span") -> list[npt.NDArray[np.bool_]]:
        """Return what rows see in blocks without and, if there are any, with a window."""
        window = max(self._windows)
        return [span.find_visible(), span.find_visible(window)] if window else [span.find_visible()]


def _cut(counts: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Passes over so many rows of each sequence: which one, from which row on, and how many."""
    rows = ((index, row) for index, count in enumerate(counts) for row in range(count))
    while piece := list(itertools.islice(rows, _PIECE)):
        found = []
        for index, group in itertools.groupby(piece, lambda pair: pair[0]):
            numbers = [row for _, row in group]
            found.append((index, numbers[0], len(numbers)))
        for at in range(0, len(found), _MOST_PARTS):
            yield found[at : at + _MOST_PARTS]


def use_decoder(model: Any, kernel: DecoderKernel) -> None:
    """Let the passes of a model that are the kernel's go through it."""
    install([Patch(model, _with_kernel, {"decoder_kernel": kernel})])


def kernel_of(model: Any) -> DecoderKernel | None:
    """What the passes of a model go through, if anything."""
    return getattr(model, "decoder_kernel", None)


def fill_only(model: Any) -> Any:
    """`model`, called where only keys and values are wanted."""
    kernel = kernel_of(model)
    if kernel is None:
        return model

    def fill(tokens: mx.array, cache: Any = None) -> mx.array:
        stores = kernel.stores_of(model, tokens, cache)
        if stores is None or any(store.span.visible is not None for store in stores):
            found: mx.array = model(tokens, cache=cache)
            return found
        kernel.fill(tokens, stores)
        return mx.zeros((1, 0, kernel.vocabulary))

    return fill


@functools.cache
def _with_kernel(plain: type) -> type:
    """Derive the class whose passes go through the model's kernel."""

    def call(self: Any, inputs: mx.array, cache: Any = None, *more: Any, **named: Any) -> Any:
        kernel: DecoderKernel = self.decoder_kernel
        stores = None if more or named else kernel.stores_of(self, inputs, cache)
        if stores is not None:
            return kernel.run(inputs, stores)
        return plain.__call__(self, inputs, cache, *more, **named)

    return type(f"Packed{plain.__name__}", (plain,), {"__call__": call})
