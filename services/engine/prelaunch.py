"""Launch the next verification while one is running, before its tokens are known.

It waits on the device (`services.kernels.cuda.doorbell`), so that a verification starts there when
its tokens arrive, and not when a pass has been built. One sequence at a time: for several a shared
pass is better.
"""

import itertools
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import mlx.core as mx

from protocol.decoding.token_tree import TokenTree, read_tree
from services.engine.batch import Batch, BatchPart
from services.engine.pass_handle import Ids, PassHandle, ReservedPass
from services.engine.runner import ModelRunner
from services.engine.trace import prefill
from services.engine.traced_forward import TRACED_SLOTS, TREE_ROWS, TracedForward
from services.kernels.cuda.doorbell import Doorbell, open_doorbell
from services.kv.cache import KVStore
from services.kv.state import SequenceState
from services.mlx.selftest import is_close, is_faster, measure_distance
from services.runtime.preparation import Steps

_log = logging.getLogger(__name__)

_REMEMBERED = 24
"""Verifications whose lengths determine the rows of the next pass."""
_LEAST_ROWS = 8
"""Fewest rows of a pass: fewer would hardly be faster, and would limit the length of drafts."""
_ASSUMED_MS = {size: 1.0 + 0.012 * size for size in TREE_ROWS if size >= _LEAST_ROWS}
"""Assumed until passes are timed: rows are cheap where passes are prelaunched."""
_MOST_MISSED = 5
"""Passes that may be rung too late, in addition to one in a hundred, before prelaunching stops."""
_TRIAL_PROMPT = 200
_TRIAL_ROWS = 4
_CHAIN = read_tree(list(range(5, 5 + _TRIAL_ROWS)), [])
_TRIAL_TURNS = 24
_SETTLED = 12
"""Turns after which all memory has been allocated and all graphs have been built."""
_ARRIVAL_S = 0.001
"""Time until the next tokens arrive."""
_WHAT = "passes launched before their tokens are known"


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

    def forget(self) -> None:
        """Forget the trees verified so far, and cancel the waiting pass."""
        self._lengths.clear()
        self.call_off()

    def expect_passes(self, pass_ms: Mapping[int, float]) -> None:
        """Set the milliseconds of passes by rows, and forget the trees verified so far."""
        self.forget()
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
        # Rows of a branching tree may be moved, which would make the pass useless.
        fits = tree.is_chain and len(tree) <= max(self._pass_ms)
        if not fits or not isinstance(state, KVStore) or state.memory is not None:
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


def find_doorbell(runner: ModelRunner, new_store: Callable[[], KVStore]) -> Steps[Doorbell | None]:
    """Return a doorbell if passes that wait for one are correct and faster here.

    Args:
        runner: runs the model's passes, trees among them from traces.
        new_store: creates an empty store for a sequence of this model.
    """
    bell = open_doorbell() if runner.traced is not None else None
    if bell is None or runner.traced is None:
        return None
    trial = _Trial(runner, runner.traced, new_store, bell)
    try:
        used = yield from trial.run()
    # Faults of a device or a driver must show here, and not in an answer.
    except Exception as error:  # noqa: BLE001
        _log.warning("%s: %s: not used", _WHAT, error)
        return None
    return bell if used else None


class _Trial:
    """Consecutive chains, requested normally or prelaunched."""

    def __init__(
        self,
        runner: ModelRunner,
        traced: TracedForward,
        new_store: Callable[[], KVStore],
        bell: Doorbell,
    ) -> None:
        self._runner, self._traced, self._bell = runner, traced, bell
        self._stores = [prefill(runner.model, new_store, _TRIAL_PROMPT) for _ in range(2)]
        self._missed = 0

    def run(self) -> Steps[bool]:
        """Return True if prelaunched passes are to be used."""
        usual_s = [self._ask()[0] for _ in range(_TRIAL_TURNS)]
        _, expected = self._ask()
        yield
        rung_s, logits = self._ring_in_turn()
        if self._missed:
            _log.info(
                "%s: %d of %d were rung too late", _WHAT, self._missed, _TRIAL_TURNS - _SETTLED
            )
            return False
        if not is_close(_WHAT, measure_distance(expected, logits)):
            return False
        ways = [statistics.median(times[_SETTLED:]) for times in (usual_s, rung_s)]
        if not is_faster(_WHAT, *ways):
            return False
        yield from self._make_graphs()
        return True

    def _make_graphs(self) -> Steps[None]:
        """Run a pass of each shape that is traced at load, twice: the first one grows its buffers.

        CUDA builds no graph while another pass waits on the device.
        """
        store = self._stores[1]
        for slots, rows in itertools.product(TRACED_SLOTS, self._traced.tree_rows):
            store.trim(_TRIAL_PROMPT)
            store.widen(slots)
            store.chain(_TRIAL_ROWS)
            for _ in range(2):
                if (pass_ := self._runner.reserve(rows, store, self._bell)) is None:
                    break
                self._bell.ring(pass_.ticket, _CHAIN, store.span.start)
                self._bell.launch(pass_.ticket.rung, pass_.logits)
                self._bell.report(mx.argmax(pass_.logits, axis=-1).astype(mx.int32))()
            yield

    def _ask(self) -> tuple[float, mx.array]:
        """Return the seconds of a pass, and its logits; the store is restored."""
        store = self._stores[0]
        part = BatchPart(store, _TRIAL_ROWS, partial(store.chain, _TRIAL_ROWS), _CHAIN.tokens)
        began = time.perf_counter()
        logits = self._runner.run(Batch([part]))[0].logits
        mx.argmax(logits, axis=-1).tolist()
        took_s = time.perf_counter() - began
        store.trim(_TRIAL_PROMPT)
        return took_s, logits

    def _ring_in_turn(self) -> tuple[list[float], mx.array]:
        """Return the seconds from ringing to the tokens, and the last logits."""
        store, times = self._stores[1], list[float]()
        store.chain(_TRIAL_ROWS)
        now, logits = self._launch(), mx.array(0)
        for turn in range(_TRIAL_TURNS):
            time.sleep(_ARRIVAL_S)
            store.trim(_TRIAL_PROMPT)
            store.chain(_TRIAL_ROWS)
            began = time.perf_counter()
            self._bell.ring(now.ticket, _CHAIN, store.span.start)
            logits = now.logits[:_TRIAL_ROWS]
            best = self._bell.report(mx.argmax(logits, axis=-1).astype(mx.int32))
            after = self._launch()
            best()
            times.append(time.perf_counter() - began)
            self._missed += turn >= _SETTLED and not now.ticket.rung.item()
            now = after
        self._bell.call_off(now.ticket)
        return times, logits

    def _launch(self) -> ReservedPass:
        rows = self._traced.pad_rows(2 * _TRIAL_ROWS)
        after = self._runner.reserve(rows, self._stores[1], self._bell)
        if after is None:
            raise ValueError("there is no trace of a tree")
        self._bell.launch(after.ticket.rung, after.logits)
        return after
