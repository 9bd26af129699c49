"""When a model's passes run: which sequences share one, and which start before they are asked for.

Passes over trees of tokens wait for one another and share a pass. Plain decoding has no gaps: the
chosen tokens stay on the device and feed the next pass there, while this process reads and reports
them. Such a pass starts ahead only if all open sequences continue with one token each, which the
orchestrator has granted (`Verify.granted`): if a sequence starts, ends or verifies a draft, waiting
for a shared pass is better. A pass over a tree whose tokens are not known yet may be launched all
the same (`engine.prelaunch`).
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, Protocol

import mlx.core as mx

from protocol.decoding.token_tree import TokenTree
from protocol.messages import Tokens
from services.engine.pass_handle import Ids, PassHandle, PassTiming, SubmittedPass
from services.engine.prelaunch import Prelauncher
from services.engine.runner import ModelRunner
from services.kv.cache import KVStore
from services.kv.state import SequenceState

_LONGEST_WAIT = 0.3
"""Longest wait for the other sequences of the last pass, as a share of its time.

Two passes in place of one cost far more.
"""


class PassQueue:
    """Passes that wait: the first whose result is needed runs, with those that may share it.

    Args:
        runner: runs them.
        most_rows: most tokens of a shared pass; a sequence alone may submit more.
    """

    def __init__(self, runner: ModelRunner, most_rows: int = 0) -> None:
        self.runner, self.most_rows = runner, most_rows
        self.waiting: list[SubmittedPass] = []

    def submit(
        self, tokens: Tokens, state: SequenceState, begin: Callable[[], Tokens]
    ) -> SubmittedPass:
        """Queue a sequence's tokens; nothing runs yet."""
        handle = SubmittedPass(state=state, new=tokens, begin=begin, queue=self.waiting)
        self.waiting.append(handle)
        return handle

    def result(self, handle: SubmittedPass) -> mx.array:
        """Return the logits of a pass; run it with all waiting ones if necessary.

        Raises any error of the model for these tokens.
        """
        if not handle.is_computed:
            self.runner.run(self._claim_with_company(handle))
        return handle.result()

    def _claim_with_company(self, first: SubmittedPass) -> list[SubmittedPass]:
        first.cancel()
        chosen, rows = [first], len(first.new)
        for other in list(self.waiting):
            rows += len(other.new)
            if rows > self.most_rows:
                break
            chosen.append(other)
            other.cancel()
        return chosen


class Scheduled(Protocol):
    """A sequence whose passes are scheduled."""

    state: SequenceState
    tokens: Tokens
    """The committed tokens."""
    passes: deque[PassHandle]
    """The pass that runs or was submitted, and those started behind it."""

    @property
    def goes_on(self) -> bool:
        """True if its pass is over one token, and another one follows, chosen on the device."""
        ...

    @property
    def is_likeliest(self) -> bool:
        """True if its tokens are the argmax of the unprocessed logits."""
        ...

    @property
    def drafter_idle(self) -> bool:
        """True if no draft is prepared during its pass."""
        ...

    @property
    def awaits_draft(self) -> bool:
        """True if its next pass is over a tree that is being prepared during this one."""
        ...

    @property
    def comes_unasked(self) -> bool:
        """True if it will request a pass by itself, in a step or two."""
        ...

    def wait_until(self, longest_s: float) -> float:
        """Return the time until which waiting for its next verification pays; 0 if it does not."""
        ...

    def choose(self, tree: TokenTree) -> None:
        """Begin the choice of tokens after the pass over a tree, unless the next one began it."""
        ...

    def choose_lazily(self) -> mx.array | None:
        """Begin the choice of the token after the current pass, if it `goes_on`; lazy."""
        ...


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
        if sequence is None or not sequence.passes or sequence.passes[0].logits is not None:
            return 0.0  # it has submitted no pass that is still to run
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
            if prelauncher and is_alone and sequence.awaits_draft and not self._prompts:
                prelauncher.launch(handle, tree, *self._sequences)
            if self.pipelines and not sequence.drafter_idle:
                handle.launch()
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
            self.queue.result(self.queue.submit([], state, partial(_begin, sequence, None)))
            state.commit(len(sequence.tokens))
        handle = self.queue.submit(tree.tokens, state, partial(_begin, sequence, tree))
        sequence.passes.append(handle)
        if len(self._sequences) > 1:
            yield None  # others may join, and some will soon, without a message
            others = self._sequences.values()
            while not handle.is_computed and any(one.comes_unasked for one in others):
                yield None
        self.queue.result(handle)
        return handle

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
        for handle in self.runner.run_ahead(choice, states, missing):
            members[handle.row].passes.append(handle)


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
    choices: Any = [one.choose_lazily() for one in members]
    return mx.concatenate(choices)
