"""Rounds that are launched before their branches are known, each as one graph.

Building the launches of a pass takes the host longer than the GPU needs to compute it. So during
a round all passes of the next one are launched, in one graph. It waits on the device
(`services.kernels.cuda.branch_doorbell`) until the outcome of the verification says what it is
over. If that was prepared, what may follow it is known: the first pass is over the new branches,
the second over the tokens chosen after them, and so on. Else the first is over the tokens that are
missing, and the second over the branches after these.

Until it is rung for or called off, nothing else on the device runs. It writes to slots after the
tree, whose rows stay where they are until the passes that see them have run.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.sampler import has_filter
from protocol.decoding.sampling_params import is_greedy
from protocol.messages import Sampling, Tokens
from services.drafter.backends.growth import Tip
from services.drafter.backends.mlx_round_trunk import Choices, RoundTree, RoundTrunk
from services.engine.batch import BatchArrays, Shape, round_to_traced
from services.engine.traced_forward import TracedForward
from services.kernels.cuda.branch_doorbell import (
    MOST_PASSES,
    MOST_ROWS,
    VIEW,
    BranchDoorbell,
    Branches,
    RoundInputs,
)
from services.kernels.cuda.choice import in_trace
from services.kernels.cuda.doorbell import TIMEOUT_MS, Ticket
from services.kernels.cuda.kv_rows import TracedLayer, find_written, writes_in_place
from services.kernels.cuda.sampling.guess import WIDTHS
from services.kernels.cuda.sampling.rules import write_rules
from services.kv.cache import KVStore
from services.sampling.device import guess

_log = logging.getLogger(__name__)

_PATH = 48
"""Slots left between a trunk and a tree for what the trunk gets meanwhile."""
_LONGEST_MS = 5.0
"""Time of a round's passes: about that of a verification by a target of few billion parameters."""
_FEWEST_PASSES = 3
_MOST_MISSED = 5
"""Rounds that may be rung for too late before no more are launched."""
_SAFE_S = 0.8e-3 * TIMEOUT_MS
"""A round that has waited longer is called off: it may give up."""

Describe = Callable[[int], Branches | None]
"""Returns what a round that starts in this slot is over; None if that cannot be told it."""


class PrelaunchedRound(NamedTuple):
    """The passes of a round, and where their rows are."""

    bell: BranchDoorbell
    ticket: Ticket
    start: int
    """Slot of the first row."""
    width: int
    """Number of guesses after each row."""

    @property
    def rows(self) -> int:
        """Rows of a pass, and slots from one to the next."""
        return self.ticket.rows

    def choices(self, at: int) -> Choices:
        """Return the choices after one of its passes."""
        return Choices(partial(self.bell.read, self.ticket, at, (2, self.rows, self.width)))


class _Waiting(NamedTuple):
    trunk: RoundTrunk
    round: PrelaunchedRound
    since: float


class RoundPrelauncher:
    """Keeps a round waiting on the device for one sequence.

    Args:
        traced: the traces of single passes; the same shapes are used.
        bell: the doorbell.
        ids: [head] int32 token ids of the head's columns.
    """

    width = WIDTHS[-1]
    """Number of guesses after each row."""

    def __init__(self, traced: TracedForward, bell: BranchDoorbell, ids: mx.array) -> None:
        self._traced, self._bell, self._ids = traced, bell, ids
        self.passes = MOST_PASSES
        self._compiled: dict[Any, Any] = {}
        self._waiting: _Waiting | None = None
        self._running: _Waiting | None = None
        self._unread: list[Choices] = []
        self._missed = 0

    def is_for(self, trunk: RoundTrunk) -> bool:
        """Return True if a round waits for this sequence."""
        return self._waiting is not None and self._waiting.trunk is trunk

    def launch(self, trunk: RoundTrunk, rows: int, running: PrelaunchedRound | None = None) -> None:
        """Launch the next round, if there is room.

        Args:
            trunk: of the sequence.
            rows: of a pass, at least.
            running: the sequence's present round, whose slots are left alone.
        """
        self.call_off()
        store, rows = trunk.store, self._traced.pad_rows(rows)
        if not isinstance(store, KVStore) or not rows or self._missed > _MOST_MISSED:
            return
        trunk.settle()
        start, end = self._find_gap(trunk, self.passes * rows, running)
        used = max([end, *(keys.shape[2] for keys, _ in store.buffers[:1])])
        if Shape(rows, slots := round_to_traced(used), forks=True) not in self._traced.shapes:
            return
        store.widen(slots)
        if self._traced.trace.may_write and writes_in_place(*store.buffers[0]):
            store.own()
        ticket, call = self._bell.issue(rows, start)
        compute = self._compile(rows, trunk.sampling)
        keys, values = ([getattr(c, name) for c in store.caches] for name in ("keys", "values"))
        sent, keys, values = compute(list(call), keys, values)
        for cache, *pair in zip(store.caches, keys, values, strict=False):
            cache.keys, cache.values = pair
        self._bell.launch(*sent)
        one = PrelaunchedRound(self._bell, ticket, start, self.width)
        self._waiting = _Waiting(trunk, one, time.monotonic())

    def start(self, trunk: RoundTrunk, rows: int, describe: Describe) -> PrelaunchedRound | None:
        """Start the round that waits, or another, over these branches; None if that is impossible.

        Args:
            trunk: of the sequence.
            rows: of the larger of the first two passes.
            describe: of the branches.
        """
        waiting = self._waiting
        if waiting is not None:
            fits = waiting.trunk is trunk and rows <= waiting.round.rows
            if not fits or time.monotonic() > waiting.since + _SAFE_S:
                self.call_off()
        if self._waiting is None:
            self.launch(trunk, rows)
        if (waiting := self._waiting) is None:
            return None
        branches = describe(waiting.round.start)
        if branches is None:
            self.call_off()
            return None
        self._bell.ring_for(waiting.round.ticket, branches)
        self._waiting, self._running = None, waiting._replace(since=time.monotonic())
        # Their box will be used again.
        for choices in self._unread:
            _ = choices.ids_and_shares
        self._unread = []
        return waiting.round

    def keep(self, choices: Choices) -> None:
        """Read these before their box is used again."""
        self._unread.append(choices)

    def finish(self) -> float:
        """Return the milliseconds of the last round, from being rung for to its last pass."""
        running = self._running
        if running is None:
            return float("inf")
        _ = running.round.choices(self.passes - 1).ids_and_shares
        return 1e3 * (time.monotonic() - running.since)

    def fit_length(self, round_ms: float) -> bool:
        """Limit the passes of a round, which cannot be stopped; False if too few fit.

        Args:
            round_ms: of a round of the present length.
        """
        self.passes = min(MOST_PASSES, int(self.passes * _LONGEST_MS / round_ms))
        self._compiled.clear()
        return self.passes >= _FEWEST_PASSES

    def forget(self) -> None:
        """Forget the rounds so far."""
        self.call_off()
        self._missed, self._unread, self._running = 0, [], None

    def call_off(self) -> None:
        """Let the device skip the round that waits, if one does."""
        if self._waiting is not None:
            self._bell.call_off(self._waiting.round.ticket)
            self._waiting = None

    def has_missed(self, one: PrelaunchedRound) -> bool:
        """Return True if a round had given up before it was rung for; waits for its first pass."""
        if self._bell.is_rung(one.ticket):
            return False
        self._missed += 1
        self._unread = []
        if self._missed > _MOST_MISSED:
            self.call_off()
            _log.warning("rounds were rung for too late: no more are launched ahead")
        return True

    def _find_gap(
        self, trunk: RoundTrunk, count: int, running: PrelaunchedRound | None
    ) -> tuple[int, int]:
        """Return the ends of slots after a trunk that neither its tree nor a round uses."""
        used = list(trunk.tree.slots) if isinstance(trunk.tree, RoundTree) else []
        if running is not None:
            used += [running.start, running.start + self.passes * running.rows - 1]
        start = trunk.store.length + _PATH
        if used and min(used) < start + count:
            start = max(start, 1 + max(used))
        return start, start + count

    def _compile(self, rows: int, sampling: Sampling) -> Any:
        filters = (sampling.top_k, sampling.top_p, sampling.min_p)
        key = rows, is_greedy(sampling), filters if has_filter(sampling) else ()
        if key not in self._compiled:

            def compute(
                inputs: list[mx.array], keys: list[mx.array], values: list[mx.array]
            ) -> tuple[list[mx.array], list[mx.array], list[mx.array]]:
                return self._compute(RoundInputs(*inputs), keys, values, rows, sampling)

            self._compiled[key] = self.compiler(compute)
        return self._compiled[key]

    compiler: Callable[[Any], Any] = staticmethod(mx.compile)

    def _compute(
        self,
        call: RoundInputs,
        keys: list[mx.array],
        values: list[mx.array],
        rows: int,
        sampling: Sampling,
    ) -> tuple[list[mx.array], list[mx.array], list[mx.array]]:
        """Return arrays that are computed when the host has each pass, and the buffers, if new."""
        branches = self._bell.await_branches(call, rows, keys[0].shape[2], self.passes)
        place = call.start, branches.positions, branches.visible
        tokens, sent = branches.tokens, list[mx.array]()
        trace, is_written = self._traced.trace, False
        for at in range(self.passes):
            batch = BatchArrays(tokens[None], *place)
            layers = [
                TracedLayer(*pair, batch, owned=trace.may_write)
                for pair in zip(keys, values, strict=True)
            ]
            with in_trace():
                logits = trace.model(batch.tokens, cache=layers)[0, :, : self._ids.size]
            keys, values = [one.keys for one in layers], [one.values for one in layers]
            is_written = bool(find_written(layers))
            rules = branches.rules[at]
            tokens, found = guess(logits, self.width, self._ids, rules, sampling)
            sent.append(self._bell.send(found, branches.rung, call, at))
            if at == 0:
                tokens, *after = self._bell.fork(branches, found, call)
                place = call.start + rows, after[0], after[1]
            else:
                start, positions, visible = batch.continue_rows(mx.array(rows, mx.int32))
                place = start, positions, visible
        return sent, [] if is_written else keys, [] if is_written else values


def describe_tips(trunk: RoundTrunk, tips: Sequence[Tip], shift: int) -> Branches | None:
    """Describe passes over these tips, and the tokens chosen after them.

    Returns None if some do not follow a token of the trunk, or lie too far behind.
    """
    if any(tip.parent >= 0 for tip in tips):
        return None
    forks = np.array([tip.fork for tip in tips])
    seen = _look_back(trunk, forks)
    if seen is None:
        return None
    parents = np.stack([np.arange(len(tips)), np.zeros(len(tips)), np.full(len(tips), -1)])
    places = forks + 2 + shift + np.arange(MOST_PASSES)[:, None]
    rules = [*write_rules(places, trunk.sampling)]
    tokens = [tip.token for tip in tips]
    return Branches(tokens, forks + 1, *seen, parents.astype(np.int64), rules)


def describe_tokens(
    trunk: RoundTrunk, tokens: Tokens, forks: npt.NDArray[np.int64], shift: int, start: int
) -> Branches | None:
    """Describe a pass over tokens after the trunk, in slots from `start` on, and branches after.

    Args:
        trunk: of the sequence.
        tokens: in a row.
        forks: as for `Branches`.
        shift: `RoundOptions.shift`.
        start: slot of the first token.

    Returns:
        None if the trunk's last tokens, or these, lie too far behind the others.
    """
    if max(len(tokens), forks.shape[1]) > MOST_ROWS:
        return None
    positions = len(trunk.tokens) + np.arange(len(tokens))
    seen = _look_back(trunk, np.full(len(tokens), len(trunk.tokens) - 1))
    if seen is None or start + len(tokens) > seen[0] + VIEW:
        return None
    base, views = seen
    own = start - base + np.arange(len(tokens))
    views[:, own] = own[None] <= own[:, None]
    later = positions[forks[0]] + 2 + shift + np.arange(MOST_PASSES - 1)[:, None]
    rules = write_rules(positions + 1 + shift, trunk.sampling)
    after = write_rules(later, trunk.sampling)
    return Branches(tokens, positions, base, views, forks, [rules, *after])


def _look_back(
    trunk: RoundTrunk, forks: npt.NDArray[np.int64]
) -> tuple[int, npt.NDArray[np.bool_]] | None:
    """Return the base and the views of `Branches` for rows that see the trunk up to `forks`."""
    base = min(int(forks.min()) + 1, trunk.store.length)
    held = np.arange(base, len(trunk.tokens))
    slots = np.array([trunk.slot_of(position) for position in held.tolist()], np.int64) - base
    if (slots >= VIEW).any():
        return None
    views = np.zeros((len(forks), VIEW), np.bool_)
    views[:, slots] = held[None] <= forks[:, None]
    return base, views
