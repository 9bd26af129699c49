"""A model's forward over a few tokens of one sequence, traced once for each shape.

A chain's shape is its number of tokens. A tree, whose size varies from round to round, is padded to
one of a few sizes; the slots its rows attend to, and their positions, are inputs too. A long chain,
which is rare, is treated as a tree.

See `engine.trace`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from protocol.decoding.token_tree import read_tree
from services.engine.batch import BatchArrays, Shape, Span, round_to_traced
from services.engine.trace import FeatureReader, Replayed, Trace, prefill
from services.kernels.cuda.blocks import serves_any_length
from services.kernels.cuda.kv_rows import writes_in_place
from services.kv.cache import KVStore, SlotCache
from services.mlx.launching import launch_first

MOST_ROWS = 9
"""Longest chain with its own trace; each length needs another one."""
TREE_ROWS: tuple[int, ...] = (4, 8, 16, 32)
"""Sizes to which trees, and longer chains, are padded, if a larger one is not faster; larger trees
are not traced.
"""
TRACED_SLOTS = (256, 512, 768, 1024)
"""Sizes of the buffers that are traced at load.

With MLX's kernels a new shape takes a second, which must not delay an answer; with ours it takes as
long as a few passes.
"""
_PROMPT = 24
"""Tokens before those traced at load."""


class Singles(NamedTuple):
    """The single tokens that are replayed."""

    awaited: bool
    """Those whose pass starts on an idle device."""
    ahead: bool
    """Those whose pass starts while another one is running."""


class TracedForward:
    """Replays a model's forward over chains of up to `MOST_ROWS` tokens, and trees.

    A single token's attention has a kernel for any length, which a trace over whole buffers cannot
    use: whether a trace is still faster is tested separately. It may be for a token that is
    awaited, where the GPU waits for launches, and not for one that begins ahead, where launches are
    hidden: both are tested.

    Args:
        model: called on tokens [1, n] and caches.
    """

    def __init__(self, model: Any) -> None:
        self._trace = Trace(model)
        self.shapes: set[Shape] = set()
        """Shapes traced so far."""
        self._traces_later = serves_any_length(model)
        """True if chains and trees after longer texts are traced on demand."""
        self.singles = Singles(awaited=True, ahead=True)
        self.tree_rows = TREE_ROWS
        """The sizes of trees in use."""

    def pad_rows(self, count: int) -> int:
        """Return the size to which a tree of `count` rows is padded; 0 if it is too large."""
        return next((size for size in self.tree_rows if size >= count), 0)

    def _shape(self, store: KVStore, span: Span) -> Shape:
        """Return the shape of a pass; without rows or slots if it is too large.

        A pass over a tree is padded.
        """
        forks = span.visible is not None or span.count > MOST_ROWS
        rows = self.pad_rows(span.count) if forks else span.count
        slots = round_to_traced(max(count_slots(store), span.start + rows))
        return Shape(rows, slots, forks)

    def read(self, reader: FeatureReader | None) -> None:
        """Include this reader's features in traces; call again when they change."""
        self._trace.read(reader)

    def serves(self, store: KVStore, *, ahead: bool = False) -> bool:
        """Return True if a pass has a shape that is traced, or can be traced now.

        Args:
            store: of the sequence, with its current pass.
            ahead: True if the pass starts while another one is running.
        """
        alone = self.singles.ahead if ahead else self.singles.awaited
        span = store.span
        if span.count == 1 and not alone:
            return False
        shape = self._shape(store, span)
        return _suits(store, span, shape) and self._has(shape)

    def _has(self, shape: Shape) -> bool:
        """Return True if this shape is traced, or can be traced now."""
        longest = shape._replace(slots=TRACED_SLOTS[-1])
        later = self._traces_later and shape.slots > longest.slots and longest in self.shapes
        return later or shape in self.shapes

    def prepare(self, shape: Shape, new_store: Callable[[], KVStore]) -> None:
        """Trace chains or trees of this shape, and compute one."""
        store = prefill(self._trace.model, new_store, _PROMPT)
        store.widen(shape.slots)
        parents = [0] * (shape.rows - 1) if shape.forks else []
        tree = read_tree(list(range(1, 1 + shape.rows)), parents)
        store.append_tree(tree)
        mx.eval(self(mx.array(tree.tokens)[None], store))
        self.shapes.add(shape)

    def can_trace(self, store: KVStore) -> bool:
        """Return True if the store's current pass is a chain or a tree in plain slots."""
        return _suits(store, store.span, self._shape(store, store.span))

    def __call__(self, tokens: mx.array, store: KVStore, *, ahead: bool = False) -> mx.array:
        """Compute lazy logits [1, n, vocabulary] of `store`'s current pass, [1, n] tokens.

        On an idle GPU (not `ahead`), the first layers are launched before the others are submitted.
        """
        count = store.span.count
        replayed = self.replay(self.lay_out(tokens, store), store)
        if replayed.written:
            store.written = replayed.written
        if not ahead:
            launch_first(store.milestones)
        return replayed.logits[:, :count]

    def lay_out(self, tokens: mx.array, store: KVStore) -> BatchArrays:
        """Return the rows of `store`'s current pass, [1, n] tokens, padded; widen its buffers."""
        span, shape = store.span, self._shape(store, store.span)
        store.widen(shape.slots)
        if not shape.forks:
            return BatchArrays(tokens, mx.array(span.start))
        if more := shape.rows - span.count:
            tokens = mx.pad(tokens, [(0, 0), (0, more)])
        return BatchArrays(tokens, *span.pad(shape.rows, shape.slots))

    def find_slots(self, rows: int, store: KVStore) -> int:
        """Return the slots of a pass over a tree of up to `rows` rows after the current one.

        Returns 0 if there is no trace of such a shape, or the buffers have to grow first.
        """
        slots = count_slots(store)
        fits = store.length + rows <= slots == round_to_traced(slots)
        return slots if fits and self._has(Shape(rows, slots, forks=True)) else 0

    def replay(self, arrays: BatchArrays, store: KVStore) -> Replayed:
        """Replay a pass; the store gets its rows. Arguments as for a `Trace`."""
        keys, values = store.caches[0].keys, store.caches[0].values
        if (
            self._trace.may_write
            and keys is not None
            and values is not None
            and writes_in_place(keys, values)
        ):
            store.own()
        replayed = self._trace(arrays, store.caches)
        if self._trace.reader is not None and replayed.features is not None:
            self._trace.reader.put(replayed.features)
        return replayed


def count_slots(store: KVStore) -> int:
    """Return the number of slots of the present buffers."""
    keys = store.caches[0].keys
    return 0 if keys is None else keys.shape[2]


def has_plain_slots(store: KVStore) -> bool:
    """Return True if every layer keeps its tokens in plain slots, without a window."""
    return all(type(cache) is SlotCache and cache.window is None for cache in store.caches)


def _suits(store: KVStore, span: Span, shape: Shape) -> bool:
    """Return True if passes of this shape can go into the store's plain slots."""
    return min(shape.rows, shape.slots, span.start) > 0 and has_plain_slots(store)
