"""Memory of the layers of one sequence, as the services see it.

A pass begins with `append` and ends with `commit`, which says how many tokens stand. Layers
differ in how they go back: slots of keys and values are cut, a recurrent state has to be
computed again. Only the implementations know (`kv.cache`, `kv.layered`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.token_tree import TokenTree


class PassSize(NamedTuple):
    """Memory that a pass takes besides products and the slots of its tokens."""

    states: int = 0
    """Bytes of the recurrent states, which it leaves anew."""
    per_row: int = 0
    """Bytes for each token, while a layer is computed."""
    most_kept: int = 0
    """Rows of the longest chain of which the states between the rows are held, too."""
    windows: int = 0
    """Bytes that windows take later on, and not yet with their first token."""
    held_per_row: int = 0
    """Bytes for each token where nothing is freed before all layers are computed, as on CUDA; 0: no
    more than `per_row`."""


class SequenceState(Protocol):
    """The state of one sequence in every layer of a model."""

    caches: list[Any]
    """What the model takes as its cache."""

    @property
    def length(self) -> int:
        """Tokens that stand, and those of the pass in work."""
        ...

    @property
    def owed(self) -> int:
        """The last tokens of `length` that the next pass must feed again, before its own."""
        ...

    @property
    def most_owed(self) -> int:
        """How many owed tokens may be fed beside others; more of them get a pass of their own."""
        ...

    @property
    def needs_checkpoints(self) -> bool:
        """True if forks can begin at a few points only."""
        ...

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """[tokens] positions of the tokens of the pass in work."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory of all buffers, used or not."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes that another token adds in the long run; known after the first pass."""
        ...

    @property
    def pass_size(self) -> PassSize:
        """Memory that its passes take; known after the first one."""
        ...

    def append(self, count: int, *, whole: bool = False) -> None:
        """Begin a pass over the owed tokens and `count` new ones; the pass before stands.

        `whole`: all of them will stand, or none.
        """
        ...

    @property
    def takes_trees(self) -> bool:
        """True if a pass may be over a tree of tokens."""
        ...

    def append_tree(self, tree: TokenTree) -> None:
        """Begin a pass over the tokens of a tree, each seeing its ancestors alone.

        Nothing is owed. The pass ends with `commit_rows`, or `commit` of no more than stood.

        Raises:
            ValueError: the state takes chains only.
        """
        ...

    def commit_rows(self, rows: Sequence[int]) -> None:
        """End a pass over a tree: these rows stand, a path from its first one."""
        ...

    def commit(self, length: int) -> None:
        """End the pass: `length` tokens stand, those behind them are forgotten.

        Raises:
            ValueError: there are fewer, or the state cannot go back that far.
        """
        ...

    def suspend(self) -> Any:
        """Undo the pass in work, which has run; returns what `resume` needs to redo it."""
        ...

    def resume(self, suspended: Any) -> None:
        """Be in the middle of a suspended pass again; nothing has happened since."""
        ...

    def resumable(self, length: int) -> int:
        """The most of the first `length` tokens that a fork can begin with."""
        ...

    def fork(self, length: int) -> "SequenceState":
        """A state of its own with the first `length` tokens, which must be resumable.

        The two share memory until one of them writes.
        """
        ...

    def checkpoint(self, *, ends_turn: bool = False) -> None:
        """Remember this point, so that forks can begin here later on.

        `ends_turn`: a message of a chat ends here. Of many points a few stay.
        """
        ...

    def evaluate(self) -> None:
        """Compute what has been stored so far."""
        ...

    def dump(self, length: int) -> dict[str, mx.array]:
        """The first `length` tokens' state as named arrays; they must be resumable."""
        ...

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Begin with what `dump` gave; this state must be empty.

        Raises:
            ValueError, KeyError: the arrays are those of another model.
        """
        ...

    def take(self, buffers: Sequence[tuple[mx.array, mx.array]], length: int) -> None:
        """Begin with keys and values, [1, heads, slots, size] per layer, of `length` tokens.

        They are not copied: nobody else may hold them. This state must be empty.

        Raises:
            ValueError: the layers differ in number, or hold more than keys and values.
        """
        ...
