"""Launch the next verification while one is running, before its tokens are known.

It waits on the device (`services.kernels.cuda.doorbell`), so that a verification starts there when
its tokens arrive, and not when a pass has been built. One sequence at a time: for several a shared
pass is better.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx

from protocol.decoding.token_tree import TokenTree
from services.engine.pass_handle import Ids, PassHandle, ReservedPass
from services.engine.prelaunch_trial import find_doorbell
from services.engine.runner import ModelRunner
from services.engine.traced_forward import TREE_ROWS
from services.kernels.cuda.doorbell import Doorbell
from services.kv.cache import KVStore
from services.kv.state import SequenceState
from services.runtime.preparation import Steps

_log = logging.getLogger(__name__)

_REMEMBERED = 24
"""Verifications whose lengths determine the rows of the next pass."""
_LEAST_ROWS = 8
"""Fewest rows of a pass: fewer would hardly be faster, and would limit the length of drafts."""
_ASSUMED_MS = {size: 1.0 + 0.012 * size for size in TREE_ROWS if size >= _LEAST_ROWS}
"""Assumed until passes are timed: rows are cheap where passes are prelaunched."""
_MOST_MOVED = 0.06
"""Share of branching trees whose rows may be moved, which makes the pass after them useless: it
then costs a whole pass, and prelaunching saves about this share of one.
"""
_ASSUMED_MOVED, _SMOOTHING = 0.12, 1 / 16
"""Initial estimate of that share, and the weight of the next tree."""
_MOST_MISSED = 5
"""Passes that may be rung too late, in addition to one in a hundred, before prelaunching stops."""


def choose_rows(lengths: Iterable[int], pass_ms: Mapping[int, float]) -> int:
    """Return the number of rows for a pass whose tree is not known yet.

    A pass that is too short still has to run, followed by the pass over the tree.

    Args:
        lengths: of the trees verified last, none larger than a pass may be.
        pass_ms: milliseconds of a pass by its rows, for each available size.
    """
    sizes = sorted(pass_ms)
    padded = [next(size for size in sizes if size >= length) for length in lengths]

    def cost(size: int) -> float:
        return sum(pass_ms[size] + (pass_ms[needed] if needed > size else 0.0) for needed in padded)

    return min(sizes, key=cost)


class Prelauncher:
    """Keeps a pass waiting on the device for the only open sequence.

    Args:
        runner: builds it.
        bell: its doorbell; None disables prelaunching.
    """

    def __init__(self, runner: ModelRunner, bell: Doorbell | None = None) -> None:
        self._runner, self._bell = runner, bell
        self._waiting: ReservedPass | None = None
        self._number = 0
        self._lengths: deque[int] = deque(maxlen=_REMEMBERED)
        sizes = TREE_ROWS if runner.traced is None else runner.traced.tree_rows
        self._pass_ms = {size: _ASSUMED_MS[size] for size in sizes if size in _ASSUMED_MS}
        self._taken = self._missed = 0
        self._moved = _ASSUMED_MOVED

    def expect_passes(self, pass_ms: Mapping[int, float]) -> None:
        """Set the milliseconds of trees by rows, and drop statistics gathered until then."""
        self._lengths.clear()
        if pass_ms.keys() >= self._pass_ms.keys():
            self._pass_ms = {size: pass_ms[size] for size in self._pass_ms}

    def keep_for(self, number: int | None) -> None:
        """Cancel the waiting pass unless it is this sequence's: other work needs the device."""
        if number != self._number:
            self.call_off()

    def launch(self, current: PassHandle, tree: TokenTree, number: int) -> None:
        """Launch the pass after this one, if it can be.

        Args:
            current: a pass with its choice, all requested results of which are lazy; its state
                holds the tree.
            tree: of this pass.
            number: of the sequence.
        """
        choice, state = current.choice, current.state
        if not isinstance(choice, mx.array) or isinstance(current.features, mx.array):
            return  # the host chooses, or has to fetch what is read of the target
        if self._bell is None or self._waiting is not None:
            return
        moves = self._moved > _MOST_MOVED and not tree.is_chain
        fits = len(tree) <= max(self._pass_ms)
        if moves or not fits or not isinstance(state, KVStore) or state.memory is not None:
            return
        self._lengths.append(len(tree))
        after = self._runner.reserve(choose_rows(self._lengths, self._pass_ms), state, self._bell)
        if after is not None:
            current.report = self._bell.report(choice)
            self._bell.launch(after.ticket.rung, after.logits)
            self._waiting, self._number = after, number

    def claim(self, state: SequenceState, tree: TokenTree) -> ReservedPass | None:
        """Return the waiting pass, now the state's over this tree; None if there is none for it."""
        waiting = self._waiting
        if waiting is None or waiting.state is not state or not waiting.fill(tree):
            self.call_off()
            return None
        self._waiting = None
        return waiting

    def settle(self, current: PassHandle) -> Ids | None:
        """Return the tokens chosen after a pass; None if it has to be run again.

        Nothing else of a pass can be read while the next one waits on the device: where choices are
        left to the host, that one is cancelled.
        """
        tokens = None if current.report is None else current.tokens()
        missed = False
        if isinstance(current, ReservedPass):
            missed = current.is_missed
            self._count(missed=missed)
        if tokens is not None and (missed or (tokens < 0).any()):
            self.call_off()
        if missed:
            return None
        return current.tokens() if tokens is None else tokens

    def on_judged(self, tree: TokenTree, rows: Sequence[int]) -> None:
        """Record the accepted rows: if others are moved, a waiting pass is useless."""
        moved = rows[-1] >= len(rows)
        if not tree.is_chain:
            self._moved += _SMOOTHING * (moved - self._moved)
        if moved:
            self.call_off()

    def call_off(self) -> None:
        """Cancel the waiting pass."""
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _count(self, *, missed: bool) -> None:
        self._taken += 1
        self._missed += missed
        if missed and self._missed > _MOST_MISSED + self._taken // 100:
            _log.warning(
                "%d of %d passes were rung too late: none is launched before its tokens are known",
                self._missed,
                self._taken,
            )
            self._bell = None


def open_prelauncher(runner: ModelRunner, store: SequenceState) -> Steps[Prelauncher | None]:
    """Return a prelauncher for this model, with an empty state, if the device is faster with it."""
    if not isinstance(store, KVStore):
        return None
    bell = yield from find_doorbell(runner, lambda: store.fork(0))
    return None if bell is None else Prelauncher(runner, bell)
