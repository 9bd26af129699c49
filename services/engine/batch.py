"""What a forward pass is over: the only description of its rows.

A `Span` is one sequence's part of a pass. It imports nothing of the other rooms, which all may
import it.
"""

from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.token_tree import TokenTree

Positions = npt.NDArray[np.int64]
Visible = npt.NDArray[np.bool_]


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

    def following(self) -> "Span":
        """Return the span of one more token after each of these branches."""
        positions = np.concatenate([self.positions, self.own_positions + 1])
        own = np.eye(self.count, dtype=np.bool_)
        return Span(self.end, positions, np.concatenate([self.find_visible(), own], axis=1))

    def pad(self, rows: int, slots: int) -> tuple[mx.array, mx.array]:
        """Return [rows] positions and [rows, slots] visible slots.

        A row of padding attends only to itself, in a slot after the others, which the next pass
        overwrites.
        """
        positions = np.full(rows, self.start, np.int32)
        positions[: self.count] = self.own_positions
        visible = np.eye(rows, slots, self.start, dtype=np.bool_)
        visible[: self.count, : self.end] = self.find_visible()
        return mx.array(positions), mx.array(visible)


def tree_span(start: int, tree: TokenTree) -> Span:
    """Return the span of a tree after `start` tokens."""
    positions = np.concatenate([np.arange(start), start + np.array(tree.depths)])
    before = np.ones((len(tree), start), np.bool_)
    return Span(start, positions, np.concatenate([before, tree.visible()], axis=1))
