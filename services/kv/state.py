"""Memory of the layers of one sequence, as the services see it.

A pass begins with `append` and ends with `commit`, which sets how many tokens are kept. Layers
differ in how they rewind: slots of keys and values are cut, a recurrent state has to be recomputed.
Only the implementations know how (`kv.cache`, `kv.layered`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from protocol.decoding.token_tree import TokenTree
from services.engine.batch import Span


class PassSize(NamedTuple):
    """Memory of a pass in addition to products and the slots of its tokens."""

    states: int = 0
    """Bytes of the recurrent states, which every pass allocates anew."""
    per_row: int = 0
    """Bytes per token while a layer is computed."""
    most_kept: int = 0
    """Rows of the longest chain whose states between the rows are held, too."""
    windows: int = 0
    """Bytes that windows take once full, but not yet with their first token."""
    held_per_row: int = 0
    """Bytes per token where nothing is freed before all layers are computed, as on CUDA; 0 means no
    more than `per_row`.
    """


class SequenceState(Protocol):
    """The state of one sequence in every layer of a model."""

    caches: list[Any]
    """The cache argument of the model."""

    @property
    def length(self) -> int:
        """Number of committed tokens plus those of the current pass."""
        ...

    @property
    def owed(self) -> int:
        """The last tokens of `length`, which the next pass must feed again before its own."""
        ...

    @property
    def most_owed(self) -> int:
        """Number of owed tokens that can be fed along with others; more get their own pass."""
        ...

    @property
    def needs_checkpoints(self) -> bool:
        """True if forks can start only at a few points."""
        ...

    @property
    def span(self) -> Span:
        """The rows of the current pass."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory of all buffers, used or not."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes that another token adds once buffers have grown; known after the first pass."""
        ...

    @property
    def pass_size(self) -> PassSize:
        """Memory of its passes; known after the first one."""
        ...

    def append(self, count: int, *, whole: bool = False) -> None:
        """Begin a pass over the owed tokens and `count` new ones; the pass before is committed.

        `whole`: all of them will be kept, or none.
        """
        ...

    @property
    def takes_trees(self) -> bool:
        """True if a pass can be over a tree of tokens."""
        ...

    def append_tree(self, tree: TokenTree) -> None:
        """Begin a pass over the tokens of a tree or chain, each attending to its ancestors only.

        Nothing may be owed. The pass ends with `commit_rows`, or with `commit` of at most the
        length before it.

        Raises:
            ValueError: it branches, and the state takes chains only.
        """
        ...

    def commit_rows(self, rows: Sequence[int]) -> None:
        """End a pass over a tree, keeping these rows: a path from its first one."""
        ...

    def commit(self, length: int) -> None:
        """End the pass with the first `length` tokens committed; drop those after them.

        Raises:
            ValueError: there are fewer, or the state cannot rewind that far.
        """
        ...

    def suspend(self) -> Any:
        """Undo the current pass, which has run; returns what `resume` needs to redo it."""
        ...

    def resume(self, suspended: Any) -> None:
        """Redo a suspended pass; the state must not have changed since."""
        ...

    def resumable(self, length: int) -> int:
        """Return the largest number of the first `length` tokens that a fork can keep."""
        ...

    def fork(self, length: int) -> "SequenceState":
        """Return an independent state with the first `length` tokens, which must be resumable.

        The two share memory until one of them writes.
        """
        ...

    def checkpoint(self, *, ends_turn: bool = False) -> None:
        """Save this point so that forks can start here later.

        `ends_turn`: a chat message ends here. Only a few points are kept.
        """
        ...

    def evaluate(self) -> None:
        """Evaluate what has been stored."""
        ...

    def dump(self, length: int) -> dict[str, mx.array]:
        """Return the state of the first `length` tokens as named arrays; they must be resumable."""
        ...

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Start with the result of `dump`; this state must be empty.

        Raises:
            ValueError, KeyError: the arrays belong to another model.
        """
        ...

    def take(self, buffers: Sequence[tuple[mx.array, mx.array]], length: int) -> None:
        """Start with keys and values, [1, heads, slots, size] per layer, of `length` tokens.

        They are not copied, so the caller must give up its references. This state must be empty.

        Raises:
            ValueError: the layers differ in number, or hold more than keys and values.
        """
        ...
