"""When a model's passes run: which sequences share one, and which start before they are asked for.

Passes over trees of tokens wait for one another and share a pass. Plain decoding has no gaps: the
chosen tokens stay on the device and feed the next pass there, while this process reads and reports
them. Such a pass starts ahead only if all open sequences continue with one token each, which the
orchestrator has granted (`Verify.granted`): if a sequence starts, ends or verifies a draft, waiting
for a shared pass is better. A pass over a tree whose tokens are not known yet may be launched all
the same (`engine.prelaunch`).
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import mlx.core as mx

from protocol.decoding.token_tree import TokenTree
from protocol.messages import Tokens
from services.engine.batch import Batch, BatchPart
from services.engine.pass_handle import Ids, PassHandle, PassQueue, PassTiming, Submission
from services.engine.prelaunch import Prelauncher
from services.engine.runner import ModelRunner
from services.kv.cache import KVStore
from services.kv.state import SequenceState
from services.mlx.launching import launch

_log = logging.getLogger(__name__)

_LONGEST_WAIT = 0.3
"""Longest wait for the other sequences of the last pass, as a share of its time.

Two passes in place of one cost far more.
"""
_UNKNOWN_S = 0.002
"""Assumed time between an outcome and the next verification, for a prepared chain."""
_LEAST_S = 0.002
_MOST_WAITS = 4.0
"""Cap on that time, in longest waits: one long gap, for a prompt or a draft, is soon forgotten."""
_SMOOTHING = 0.3
_FORGIVING = 0.75


@dataclass(kw_only=True)
class Scheduled(ABC):
    """A sequence whose passes are scheduled."""

    state: SequenceState
    tokens: Tokens
    """The committed tokens."""
    passes: deque[PassHandle] = field(default_factory=deque)
    """The pass that runs, and those started behind it."""
    submitted: Submission | None = None
    """Its part of that pass, unless it was started ahead; it may still wait to run."""
    drafter_idle: bool = False
    """True if no draft is prepared during its pass."""
    answered_at: float = 0.0
    """Time of its last outcome."""
    gap_s: float = _UNKNOWN_S
    """Usual time from an outcome to its next verification."""

    @property
    @abstractmethod
    def granted(self) -> int | None:
        """Further passes of one token that its request permits; None without a request."""

    @property
    @abstractmethod
    def goes_on(self) -> bool:
        """True if its pass is over one token, and another one follows, chosen on the device."""

    @property
    @abstractmethod
    def is_likeliest(self) -> bool:
        """True if its tokens are the argmax of the unprocessed logits."""

    @abstractmethod
    def begin_choice(self, logits: mx.array, tree: TokenTree | None) -> mx.array | None:
        """Begin the choice of tokens after these rows, lazy; None if the host chooses.

        Args:
            logits: [rows, vocabulary].
            tree: of the pass; None for its requested token.
        """

    @property
    def awaits_request(self) -> bool:
        """True if its next pass is over a tree that is not known yet."""
        return self.granted == 0

    @property
    def comes_unasked(self) -> bool:
        """True if it will request a pass by itself, in a step or two."""
        if self.granted is None or self.submitted is None:
            return self.granted is not None
        return not self.submitted.waits and self.granted > 0

    def choose(self, tree: TokenTree) -> None:
        """Begin the choice of tokens after the pass over a tree, unless the next one began it."""
        head = self.passes[0]
        if head.choice is None and self.is_likeliest:
            head.choice = head.best()
        if head.choice is None:
            head.choice = self.begin_choice(head.logits, tree)

    def commit(self, tree: TokenTree, rows: Sequence[int]) -> None:
        """End the current pass, over a tree, committing these rows."""
        tokens = [tree.tokens[row] for row in rows]
        if tree.is_chain:
            self.state.commit(len(self.tokens) + len(tokens))
        else:
            self.state.commit_rows(rows)
        self.tokens += tokens
        self.passes.popleft()
        self.submitted = None

    def drop_passes(self) -> None:
        """Drop all passes, those that run too."""
        for one in (self.submitted, *self.passes):
            if one is not None:
                one.cancel()
        self.submitted = None
        self.passes.clear()

    def on_request(self, now: float, busy_since: float, longest_s: float) -> None:
        """Record the arrival of its next verification.

        Args:
            now: latest possible time of arrival.
            busy_since: start of the last pass.
            longest_s: longest wait for it; 0 if unknown.
        """
        if not self.answered_at:
            return
        most_s = _MOST_WAITS * longest_s or inf
        if busy_since <= self.answered_at:
            gap_s = min(most_s, now - self.answered_at)
            self.gap_s += _SMOOTHING * (gap_s - self.gap_s)
        else:
            # It arrived during a pass, at an unknown time. A failed wait counts double; a sequence
            # that is no longer waited for gets another chance in time.
            missed_s = min(most_s, 2.0 * (busy_since - self.answered_at))
            self.gap_s = max(_FORGIVING * self.gap_s, missed_s)

    def wait_until(self, longest_s: float) -> float:
        """Return the time until which waiting for its next verification pays; 0 if it does not."""
        if self.submitted or self.passes or not self.answered_at or self.gap_s > longest_s:
            return 0.0
        return self.answered_at + min(longest_s, 2.0 * self.gap_s + _LEAST_S)


class Scheduler:
    """Runs the passes of open sequences.

    Args:
        runner: runs the model's passes.
        sequences: all open sequences, by number.
        prompts: those in progress, for which the device is needed as well.
    """

    def __init__(
        self, runner: ModelRunner, sequences: Mapping[int, Scheduled], prompts: Sized
    ) -> None:
        self.runner, self.queue = runner, PassQueue(runner)
        self._sequences, self._prompts = sequences, prompts
        self.pipelines = False
        """True if a pass can start before its token has been read."""
        self.prelauncher: Prelauncher | None = None
        """Launches passes over trees that are not known yet, where that is faster."""
        self.last_pass, self.idle_since = PassTiming(), time.perf_counter()
        self._followed: PassTiming | None = None
        """The last pass after which starting one ahead was considered: that happens once."""

    def linger_s(self, number: int) -> float:
        """Return a short wait for the other sequences of the last pass, which are expected soon."""
        sequence = self._sequences.get(number)
        if sequence is None or sequence.submitted is None or not sequence.submitted.waits:
            return 0.0
        longest = self.longest_wait_s
        until = [other.wait_until(longest) for other in self._sequences.values()]
        return max(0.0, max(until, default=0.0) - time.perf_counter())

    @property
    def longest_wait_s(self) -> float:
        """The longest worthwhile wait for the sequences of the last pass; 0 until it has ended."""
        return _LONGEST_WAIT * max(0.0, self.last_pass.ended - self.last_pass.started)

    def run(
        self, sequence: Scheduled, tree: TokenTree
    ) -> Generator[None, None, tuple[PassHandle, Ids | None]]:
        """Return the pass over a tree and its chosen tokens, None if the host chooses.

        The next pass may be running by then. The state holds the tree.

        Args:
            sequence: an open one.
            tree: what is verified of its request.
        """
        while True:
            handle = yield from self._start(sequence, tree)
            sequence.choose(tree)
            prelauncher, is_alone = self.prelauncher, len(self._sequences) == 1
            if prelauncher and is_alone and sequence.awaits_request and not self._prompts:
                prelauncher.launch(handle, tree, *self._sequences)
            if handle.choice is None:
                return handle, None
            tokens = handle.tokens() if prelauncher is None else prelauncher.settle(handle)
            if tokens is not None:
                return handle, tokens
            sequence.passes.clear()
            sequence.state.commit(len(sequence.tokens))

    def record(self, timing: PassTiming) -> None:
        """Record the times of a pass, which end with its first outcome."""
        now = time.perf_counter()
        if timing is not self.last_pass:
            timing.waited, timing.ended = timing.started - self.idle_since, now
            self.last_pass = timing
        # The next line may lose the core to a process that waited for the outcome.
        self.idle_since = now

    def _start(self, sequence: Scheduled, tree: TokenTree) -> Generator[None, None, PassHandle]:
        """Start the pass over a tree, or claim one that has been started."""
        passes = sequence.passes
        if passes and passes[0].fill(tree):
            handle = passes[0]
            if handle.timing is not self.last_pass:  # running ever since: the device was not idle
                handle.timing.started = self.idle_since
        else:
            passes.clear()  # those behind the first were built on it
            prelauncher = self.prelauncher
            reserved = None if prelauncher is None else prelauncher.claim(sequence.state, tree)
            if reserved is not None:
                passes.append(reserved)
            handle = reserved or (yield from self._submit(sequence, tree))
        if self.pipelines:  # the device would idle until its tokens have been read
            self._start_ahead(handle.timing)
        return handle

    def _submit(self, sequence: Scheduled, tree: TokenTree) -> Generator[None, None, PassHandle]:
        """Run a pass over a tree, with those that others submit meanwhile."""
        state = sequence.state
        if state.owed > state.most_owed:
            self.queue.result(
                self.queue.submit(BatchPart(state, 0, partial(_begin, sequence, None)))
            )
            state.commit(len(sequence.tokens))
        part = BatchPart(state, len(tree.tokens), partial(_begin, sequence, tree), tree.tokens)
        sequence.submitted = submission = self.queue.submit(part, sequence.passes)
        if len(self._sequences) > 1:
            yield None  # others may join, and some will soon, without a message
            others = self._sequences.values()
            while submission.waits and any(one.comes_unasked for one in others):
                yield None
        return self.queue.result(submission)

    def _start_ahead(self, timing: PassTiming) -> None:
        """Start the pass after this running one, if possible; once, for its first sequence."""
        if timing is self._followed:
            return
        self._followed = timing
        members = [
            one
            for one in self._sequences.values()
            if one.goes_on and one.passes and one.passes[0].timing is timing
        ]
        if not len(members) == len(self._sequences) == timing.sequences or self.queue.waiting:
            return
        members.sort(key=lambda one: one.passes[0].row)
        choice, states = _choose(members), [one.state for one in members]
        if len(members) == 1:
            states[0].commit(states[0].length)  # a chain of one token is always accepted
        elif not all(isinstance(state, KVStore) for state in states):
            return
        missing = [len(one.tokens) + 1 - one.state.length for one in members]
        try:
            handles = self.runner.run(follow(choice, states, missing))
        # It occurs again, and is reported, when the pass is submitted.
        except Exception as error:  # noqa: BLE001
            _log.info("no pass of %d sequences begins ahead: %s", len(members), error)
            return
        for one, handle in zip(members, handles, strict=True):
            one.passes.append(handle)


def follow(
    choice: mx.array, states: Sequence[SequenceState], missing: Sequence[int] = (0,)
) -> Batch:
    """Return a pass over tokens that were chosen after a running one and have not been read.

    Args:
        choice: [sequences] of `device.begin`; the pass is of no use to a sequence without a token.
        states: without the tokens of this pass, also afterwards; several are of slots, which may be
            anywhere in it.
        missing: number of tokens of the running pass that each lacks, too.
    """
    tokens = mx.maximum(choice, 0)
    # Before the pass is built, so that reading them does not wait for later work.
    launch(choice, tokens)
    parts = []
    for state, count in zip(states, missing, strict=True):
        begin = partial(_append_after, state, count) if count else partial(state.append, 1)
        parts.append(BatchPart(state, 1 + count, begin))
    return Batch(parts, tokens, ahead=True)


def _append_after(state: SequenceState, missing: int) -> None:
    """Begin a pass over one token, after these."""
    state.append(missing)
    state.append(1)


def _begin(sequence: Scheduled, tree: TokenTree | None) -> Tokens:
    """Begin a pass over these new tokens, if any; return those to be fed before them."""
    tokens, state = sequence.tokens, sequence.state
    owed = tokens[len(tokens) - state.owed :]
    if tree is None:
        state.append(0)
    else:
        state.append_tree(tree)
    return owed


def _choose(members: Sequence[Scheduled]) -> mx.array:
    """Return the chosen tokens, [sequences], lazy; negative where the host decides."""
    joint = members[0].passes[0].joint
    if joint is not None and all(one.is_likeliest for one in members):
        return joint.lazy
    for one in members:
        one.passes[0].choice = one.begin_choice(one.passes[0].logits, None)
    choices: Any = [one.passes[0].choice for one in members]
    return mx.concatenate(choices)
