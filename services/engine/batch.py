"""What a forward pass is over: the only description of its rows.

A `Batch` is a pass that is to run, and says which tokens of which sequences; a `Span` are the rows
of one sequence, and `BatchArrays` those of a pass as arrays, which a trace takes. This module
imports nothing of the other rooms, which all may import it.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.token_tree import TokenTree
from protocol.messages import Tokens

if TYPE_CHECKING:
    from services.kv.cache import KVStore
    from services.kv.state import SequenceState

Positions = npt.NDArray[np.int64]
Visible = npt.NDArray[np.bool_]

BUCKET = 256
"""Slots by which a buffer grows, and the bucket of key lengths on CUDA."""
MOST_SLOTS = 131072
"""Largest buffer of a trace."""
_STEPS = (
    (1024, 256), (4096, 512), (8192, 1024), (16384, 2048),
    (32768, 4096), (65536, 8192), (MOST_SLOTS, 16384),
)  # fmt: skip
"""(slots, step): up to that many slots, buffer sizes of traces are multiples of the step."""


class Span:
    """The rows of one sequence in a pass; they go to its slots [start, end).

    Args:
        start: the first row's slot.
        positions: [end] position of the token in every slot, the rows included.
        visible: [rows, end] slots that each row attends to; None for a chain.
    """

    def __init__(self, start: int, positions: Positions, visible: Visible | None = None) -> None:
        self.start, self.end = start, len(positions)
        self.count = self.end - start
        self.positions, self.visible = positions, visible
        self.own_positions = positions[start:]
        """[rows] position of each row."""

    @cached_property
    def offset(self) -> int | mx.array:
        """RoPE positions: the first of a chain, or [rows], one array for all layers."""
        if self.visible is None:
            return self.start
        return mx.array(self.own_positions, dtype=mx.int32)

    @property
    def parent_slots(self) -> Positions:
        """[rows], the slot of the token before each; a chain consists of one token."""
        if self.visible is None:
            return np.array([self.start - 1])
        before = self.own_positions[:, None] - 1 == self.positions[None, : self.start]
        slots: Positions = np.argmax(before & self.visible[:, : self.start], axis=1)
        return slots

    def find_visible(self, window: int | None = None) -> Visible:
        """Return [rows, end], the slots that each row attends to in a layer with this window."""
        queries, keys = self.own_positions[:, None], self.positions[None]
        visible: Visible = queries >= keys if self.visible is None else self.visible
        return visible if window is None else visible & (queries - keys < window)

    def part(self, first: int, count: int) -> "Span":
        """Return `count` rows of a chain, starting at its row `first`."""
        start = self.start + first
        return Span(start, self.positions[: start + count])

    def pad(self, rows: int, slots: int) -> tuple[mx.array, mx.array, mx.array]:
        """Return the arguments of a `Batch` after its tokens, for this many rows and slots.

        A row of padding attends only to itself, in a slot after the others, which the next pass
        overwrites.
        """
        positions = np.full(rows, self.start, np.int32)
        positions[: self.count] = self.own_positions
        visible: Any = np.eye(rows, slots, self.start, dtype=np.bool_)
        visible[: self.count, : self.end] = self.find_visible()
        return mx.array(self.start), mx.array(positions), mx.array(visible)


def slice_rows(spans: Sequence[Span]) -> list[slice]:
    """Return the rows of each span where they are concatenated."""
    ends = list(itertools.accumulate(span.count for span in spans))
    return [slice(end - span.count, end) for span, end in zip(spans, ends, strict=True)]


def tree_span(start: int, tree: TokenTree) -> Span:
    """Return the span of a tree after `start` tokens."""
    positions = np.concatenate([np.arange(start), start + np.array(tree.depths)])
    before = np.ones((len(tree), start), np.bool_)
    return Span(start, positions, np.concatenate([before, tree.visible()], axis=1))


@dataclass(frozen=True)
class BatchPart:
    """One sequence's rows in a pass that is to run."""

    state: "SequenceState"
    count: int
    """Number of new tokens."""
    begin: Callable[[], Tokens | None]
    """Begins the pass on the state, right before it runs; returns tokens to be fed before these."""
    tokens: Tokens = field(default_factory=list)
    """The new tokens, unless the batch has them."""
    inputs: Callable[[], mx.array] | None = None
    """After `begin`, the model's input besides the tokens: [1, tokens, width] `states`."""


@dataclass(frozen=True)
class Batch:
    """A pass that is to run: the rows of one or several sequences, in order."""

    parts: Sequence[BatchPart]
    tokens: mx.array | None = None
    """[rows], where they are on the device, perhaps not computed yet; as many of each part."""
    ahead: bool = False
    """True if a running pass chooses the tokens, so that the states must not hold them yet."""
    place: Sequence[mx.array] = ()
    """The arguments of its `BatchArrays` after the tokens, if they are on the device, too."""

    @property
    def states(self) -> "list[SequenceState]":
        """The states of its sequences."""
        return [part.state for part in self.parts]

    def over(self, tokens: mx.array) -> "Batch":
        """Return this batch with these tokens, [rows]."""
        return replace(self, tokens=tokens)


def advance_trunk(store: "KVStore", count: int) -> Batch:
    """Return a pass that advances a trunk by `count` tokens."""
    return Batch([BatchPart(store, count, partial(store.chain, count))])


class BatchArrays:
    """The rows of a pass as arrays, the same in all layers.

    Args:
        tokens: [1, rows].
        slots: [] the first row's slot, in a chain also its position; or [rows].
        positions: [rows]; None for a chain.
        visible: [rows, slots] slots that each row attends to; None for a chain.
        first: [rows] the first slot of each row's sequence, from which its visible slots count, if
            sequences share the buffers.
    """

    def __init__(
        self,
        tokens: mx.array,
        slots: mx.array,
        positions: mx.array | None = None,
        visible: mx.array | None = None,
        first: mx.array | None = None,
    ) -> None:
        given = (tokens, slots, positions, visible, first)
        self.arrays = [array for array in given if array is not None]
        """The arguments, as inputs of a trace."""
        self.tokens, self.count = tokens, tokens.size
        self.visible, self.first = visible, first
        self.start = slots
        self.offset = slots if positions is None else positions
        """RoPE's offset: [] or [rows]."""
        self._positions = positions

    @cached_property
    def slots(self) -> mx.array:
        """[rows] the slot of each row."""
        return self.start if self.start.ndim else self.start + count_to(self.count)

    @property
    def positions(self) -> mx.array:
        """[rows] the position of each row."""
        return self.slots if self._positions is None else self._positions

    def make_mask(self, slots: int, window: int | None) -> mx.array:
        """Return bool [rows, slots], the slots that each row attends to."""
        if self.visible is not None:
            if window is not None:
                raise ValueError("a tree is not traced through a sliding window")
            return self.visible
        queries, keys = self.slots[:, None], count_to(slots)[None]
        visible = keys <= queries
        return visible if window is None else visible & (queries - keys < window)


class Shape(NamedTuple):
    """Shape of the passes that a trace serves."""

    rows: int
    slots: int
    forks: bool = False
    """True if the rows form a tree."""


def round_to_bucket(length: int) -> int:
    """Return the slots of a buffer that holds `length` tokens."""
    return -(-length // BUCKET) * BUCKET


def round_to_traced(slots: int) -> int:
    """Return the size of a trace's buffers with room for `slots` slots; 0 if there is none."""
    step = next((step for most, step in _STEPS if slots <= most), 0)
    return -(-slots // step) * step if step else 0


def count_to(count: int) -> mx.array:
    """Return [count] int32: 0, 1, 2 and so on; a trace needs no launch for it."""
    numbers = _count()
    return numbers[:count] if count <= numbers.size else mx.arange(count)


@functools.cache
def _count() -> mx.array:
    numbers = mx.arange(MOST_SLOTS)
    mx.eval(numbers)
    return numbers
