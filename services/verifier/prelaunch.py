"""The next verification is launched while one is at work, before anybody knows its tokens.

It waits on the device (`services.mlx.cuda.doorbell`), so that a verification begins there when its
tokens have come, and not when a pass has been built. One sequence at a time: for several a shared
pass is worth more.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.token_tree import TokenTree
from protocol.messages import Extend, PassTimes, Revoke, Tokens, Verify
from services.batching.forward import ForwardPass
from services.kv.cache import KVStore
from services.kv.state import SequenceState
from services.mlx.cuda.doorbell import Doorbell
from services.mlx.cuda.host_rows import ReadRows, pending
from services.mlx.cuda.prelaunch_trial import find_doorbell
from services.mlx.tracing.traced_forward import TREE_ROWS, Prelaunched, TracedForward
from services.runtime.inbox import Work
from services.verifier.target_model import TargetModel

_log = logging.getLogger(__name__)

_REMEMBERED = 24
"""Verifications, whose lengths say how many rows the next pass has."""
_LEAST_ROWS = 8
"""Of a pass: fewer would hardly be faster, and drafts could not become longer without a loss."""
_ASSUMED_MS = {size: 1.0 + 0.012 * size for size in TREE_ROWS if size >= _LEAST_ROWS}
"""Until passes were timed: rows are cheap where passes are launched beforehand."""
_MOST_MOVED = 0.06
"""Share of forking trees whose rows may be moved, so that the pass behind them is of no use: it
costs a whole pass then, and what is launched beforehand saves about so much of one."""
_ASSUMED_MOVED, _SMOOTHING = 0.12, 1 / 16
"""That share until it is known, and what the next tree counts."""
_MOST_MISSED = 5
"""Passes that may be rung too late, beyond one in a hundred; then no more are launched."""

Choices = mx.array | npt.NDArray[np.int32]


def choose_rows(lengths: Iterable[int], pass_ms: Mapping[int, float]) -> int:
    """How many rows a pass should have whose tree is not known yet.

    One that is too short for it has to run all the same, and the pass over the tree after it.

    Args:
        lengths: of the trees that were verified last, none of them larger than a pass may be.
        pass_ms: what passes take by their rows, of each size there is.
    """
    sizes = sorted(pass_ms)
    seen = [next(size for size in sizes if size >= length) for length in lengths]

    def cost(size: int) -> float:
        return sum(pass_ms[size] + (pass_ms[needed] if needed > size else 0.0) for needed in seen)

    return min(sizes, key=cost)


class PrelaunchedPass:
    """A pass of one sequence that waits for its tokens on the device.

    Args:
        begun: the pass.
        bell: it waits for.
        state: of the sequence.
        features: what is read of the model, if something is.
    """

    row, best = 0, None

    def __init__(
        self, begun: Prelaunched, bell: Doorbell, state: KVStore, features: ReadRows | None
    ) -> None:
        self._begun, self._bell, self._state = begun, bell, state
        self.features = features
        self.by, self.logits = ForwardPass(0, 0), begun.logits

    def fits(self, state: SequenceState, tree: TokenTree) -> bool:
        """Whether it can be the pass over this tree."""
        rows = self.logits.shape[0]
        room = self._begun.slots - self._state.length
        return state is self._state and len(tree) <= rows <= room

    def take_up(self, tree: TokenTree) -> None:
        """It is over this tree, which the state holds."""
        self._state.written = self._begun.written
        self._bell.ring(self._begun.late, tree, self._state.frame.start)
        self.by = ForwardPass(len(tree), 1)
        self.logits = self.logits[: len(tree)]

    def call_off(self) -> None:
        """It is of no use."""
        self._bell.call_off(self._begun.late)

    @property
    def is_missed(self) -> bool:
        """Whether it had given up when it was rung, so that its logits mean nothing; waits."""
        return not self._begun.late.rung.item()


class Prelauncher:
    """Keeps a pass waiting on the device for the only sequence there is.

    Args:
        traced: builds it.
        bell: for it to wait for; None: no pass is launched before its tokens are known.
        send: has what is read of a pass sent to the host.
    """

    def __init__(
        self,
        traced: TracedForward | None = None,
        bell: Doorbell | None = None,
        send: Callable[[mx.array], ReadRows] = lambda rows: rows,
    ) -> None:
        self._traced, self._bell, self._send = traced, bell, send
        self._waiting: PrelaunchedPass | None = None
        self._choices: Callable[[], npt.NDArray[np.int32]] | None = None
        """Reads those of the pass in work, behind which one waits."""
        self._number = 0
        self._lengths: deque[int] = deque(maxlen=_REMEMBERED)
        sizes = TREE_ROWS if traced is None else traced.tree_rows
        self._pass_ms = {size: _ASSUMED_MS[size] for size in sizes if size in _ASSUMED_MS}
        self._taken = self._missed = 0
        self._moved = _ASSUMED_MOVED

    def expect_passes(self, times: PassTimes) -> None:
        """Passes took so long at load, and of what was verified until then nothing counts."""
        self._lengths.clear()
        if times.trees.keys() >= self._pass_ms.keys():
            self._pass_ms = {size: times.trees[size] for size in self._pass_ms}

    def on_message(self, message: Work) -> None:
        """Whatever is not the next verification needs the device for something else."""
        if isinstance(message, Extend | Revoke):
            return
        if not (isinstance(message, Verify) and message.sequence == self._number):
            self.call_off()

    def launch(
        self, begun: mx.array, message: Verify, state: SequenceState, tree: TokenTree
    ) -> None:
        """Launch the pass that comes after this one, if somebody is likely to ask for it.

        Args:
            begun: all that is wanted of this one, lazy.
            message: what it is for.
            state: of the sequence, with the tree.
            tree: this one is over.
        """
        follows = message.granted == 0 and not message.drafter_idle
        if self._bell is None or self._traced is None or not follows or self._waiting is not None:
            return
        moves = self._moved > _MOST_MOVED and not tree.is_chain
        fits = len(tree) <= max(self._pass_ms)
        if moves or not fits or not isinstance(state, KVStore) or state.seat is not None:
            return
        self._lengths.append(len(tree))
        after = self._traced.prelaunch(choose_rows(self._lengths, self._pass_ms), state, self._bell)
        if after is not None:
            self._choices = self._bell.report(begun)
            read = None if after.features is None else self._send(after.features)
            wanted = [] if read is None else [pending(read)]
            self._bell.launch(after.late.rung, after.logits, *wanted)
            self._waiting = PrelaunchedPass(after, self._bell, state, read)
            self._number = message.sequence

    def take(
        self, state: SequenceState, tree: TokenTree, begin: Callable[[], Tokens]
    ) -> PrelaunchedPass | None:
        """The waiting pass, which is now over this tree; None if there is none for it.

        Args:
            state: of the sequence.
            tree: to be verified.
            begin: begins a pass over it on the state.
        """
        waiting = self._waiting
        if waiting is None or not waiting.fits(state, tree):
            self.call_off()
            return None
        self._waiting = None
        begin()
        waiting.take_up(tree)
        return waiting

    def settle(self, taken: object, begun: Choices) -> Choices | None:
        """The choices after the pass that was taken; None if it has to be run again.

        Nothing else of a pass can be looked at while the next one waits on the device: where
        choices are left to the host, that one is called off.

        Args:
            taken: the pass, or any other step.
            begun: its choices.
        """
        choices, self._choices = self._choices, None
        found = begun if choices is None else choices()
        missed = False
        if isinstance(taken, PrelaunchedPass):
            missed = taken.is_missed
            self._count(missed=missed)
        if choices is not None and (missed or (found < 0).any()):
            self.call_off()
        return None if missed else found

    def on_judged(self, tree: TokenTree, rows: Sequence[int]) -> None:
        """These rows of the tree stand: others are moved behind a pass that waits already."""
        moved = rows[-1] >= len(rows)
        if not tree.is_chain:
            self._moved += _SMOOTHING * (moved - self._moved)
        if moved:
            self.call_off()

    def call_off(self) -> None:
        """Let the device get over what waits there."""
        if self._waiting is not None:
            self._waiting.call_off()
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


def open_prelauncher(target: TargetModel, send: Callable[[mx.array], ReadRows]) -> Prelauncher:
    """One that launches passes of this target beforehand, if the device is the faster for it."""
    store = target.states.make()
    if not isinstance(store, KVStore):
        return Prelauncher()
    bell = find_doorbell(target.verify, target.traced, lambda: store.fork(0))
    return Prelauncher(target.traced, bell, send)
