"""A forward pass from its submission until its tokens are judged, as one of its sequences sees it.

A sequence keeps its handles in a deque: the pass that runs, and those started behind it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.token_tree import TokenTree
from protocol.messages import Sampling
from services.engine.batch import Batch, BatchPart
from services.kernels.cuda.doorbell import Doorbell, Ticket
from services.kernels.cuda.host_rows import ReadRows
from services.kv.cache import KVStore
from services.kv.state import SequenceState
from services.sampling import device

if TYPE_CHECKING:
    from services.engine.runner import ModelRunner

_log = logging.getLogger(__name__)

Ids = npt.NDArray[np.int32]


@dataclass(eq=False)
class PassTiming:
    """Size and times of a forward pass; its sequences share one."""

    rows: int = 0
    sequences: int = 0
    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    """Seconds that the model was idle before, for statistics."""
    ended: float = 0.0
    """Time of its first result, for statistics."""


class JointChoice:
    """The argmax tokens after all rows of a shared pass: one launch, and one transfer.

    Args:
        logits: [rows, vocabulary].
    """

    def __init__(self, logits: mx.array) -> None:
        self._logits = logits

    @cached_property
    def lazy(self) -> mx.array:
        """[rows], negative if a logit is NaN."""
        return device.begin(self._logits, [], Sampling())

    @cached_property
    def tokens(self) -> Ids:
        """Wait for the choice, and return it on the host."""
        return np.array(self.lazy)


@dataclass(eq=False, kw_only=True)
class PassHandle:
    """The rows of one sequence in a pass."""

    state: SequenceState
    timing: PassTiming = field(default_factory=PassTiming)
    row: int = 0
    """The first of its rows in the pass."""
    logits: mx.array
    """[rows, vocabulary], lazy."""
    features: ReadRows | None = None
    """[rows or more, width] of the states read from the model, lazy."""
    joint: JointChoice | None = None
    """The choice that a shared pass has in common."""
    choice: mx.array | Ids | None = None
    """[rows] the chosen tokens, possibly lazy; negative where the host decides."""
    report: Callable[[], Ids] | None = None
    """Reads the choice while the next pass waits on the device."""

    def fill(self, tree: TokenTree) -> bool:
        """Make this the state's current pass, over this tree; False if that is impossible."""
        del tree
        return False

    def best(self) -> Ids | None:
        """Return its part of the joint choice, if there is one; waits."""
        if self.joint is None:
            return None
        return self.joint.tokens[self.row : self.row + self.logits.shape[0]]

    def tokens(self) -> Ids:
        """Return the choice on the host; waits."""
        return np.array(self.choice) if self.report is None else self.report()

    def read_features(self, rows: Sequence[int]) -> npt.NDArray[Any] | None:
        """Return the features at these of its rows, on the host; waits."""
        # On a GPU picking some of them there would be a separate launch to wait for.
        return None if self.features is None else np.asarray(self.features)[list(rows)]

    def cancel(self) -> None:
        """Drop the pass, if it has not begun."""


@dataclass(eq=False, kw_only=True)
class AheadPass(PassHandle):
    """A pass over one token that was chosen on the device, and has not been read."""

    read: Callable[[], list[int]]
    """Returns the tokens of all rows of the pass."""
    resume: Callable[[], None]
    """Redoes it on the state, which does not hold its token."""

    def fill(self, tree: TokenTree) -> bool:
        """Wait for the token, and compare it with the tree."""
        if tree.tokens != [self.read()[self.row]]:
            return False
        self.resume()
        return True


@dataclass(eq=False, kw_only=True)
class ReservedPass(PassHandle):
    """A launched pass that waits on the device for its tokens."""

    bell: Doorbell
    ticket: Ticket
    slots: int
    """Slots of its buffers, which must have room for its tokens."""
    written: list[mx.array] | None
    """As `KVStore.written`, once this is the store's current pass."""

    def fill(self, tree: TokenTree) -> bool:
        """Send the tokens to the device, which starts."""
        store, rows = self.state, self.logits.shape[0]
        if not isinstance(store, KVStore) or not len(tree) <= rows <= self.slots - store.length:
            return False
        store.append_tree(tree)
        store.written = self.written
        self.bell.ring(self.ticket, tree, store.span.start)
        self.timing = PassTiming(len(tree), 1)
        self.logits = self.logits[: len(tree)]
        return True

    def cancel(self) -> None:
        """Let the device skip it, unless it has its tokens."""
        if not self.timing.rows:
            self.bell.call_off(self.ticket)

    @property
    def is_missed(self) -> bool:
        """True if it had timed out when filled, so that its logits are invalid; waits."""
        return not self.ticket.rung.item()


@dataclass(eq=False)
class Submission:
    """A sequence's part of a pass, which waits for others to share it."""

    part: BatchPart
    queue: list["Submission"]
    """Those that wait."""
    passes: deque[PassHandle]
    """Gets the handle once the pass runs."""
    handle: PassHandle | None = None
    error: Exception | None = None

    @property
    def waits(self) -> bool:
        """True if its pass has neither run nor failed."""
        return self.handle is None and self.error is None

    def cancel(self) -> None:
        """Leave the queue."""
        if self in self.queue:
            self.queue.remove(self)


class PassQueue:
    """Parts of passes that wait: the first that is needed runs, with those that may share its pass.

    Args:
        runner: runs them.
        most_rows: most tokens of a shared pass; a sequence alone may submit more.
    """

    def __init__(self, runner: "ModelRunner", most_rows: int = 0) -> None:
        self.runner, self.most_rows = runner, most_rows
        self.waiting: list[Submission] = []

    def submit(self, part: BatchPart, passes: deque[PassHandle] | None = None) -> Submission:
        """Queue a sequence's part; nothing runs yet. Its handle is appended to `passes`."""
        submission = Submission(part, self.waiting, deque() if passes is None else passes)
        self.waiting.append(submission)
        return submission

    def result(self, submission: Submission) -> PassHandle:
        """Return the handle of a pass; run it with all waiting parts if necessary.

        Raises any error of the model for these tokens.
        """
        if submission.waits:
            self._run(self._claim_with_company(submission))
        if submission.handle is None:
            raise submission.error or RuntimeError("a pass was submitted and did not run")
        return submission.handle

    def _run(self, submissions: Sequence[Submission]) -> None:
        """Run these in one pass, or one by one if that fails; each gets a handle or an error.

        A sequence that the model cannot take must not fail the others.
        """
        try:
            handles = self.runner.run(Batch([one.part for one in submissions]))
        except Exception as error:  # noqa: BLE001
            if len(submissions) == 1:
                submissions[0].error = error
                return
            _log.exception("a pass of %d sequences failed; now one by one", len(submissions))
            for one in submissions:
                self._run([one])
            return
        for one, one.handle in zip(submissions, handles, strict=True):
            one.passes.append(one.handle)

    def _claim_with_company(self, first: Submission) -> list[Submission]:
        first.cancel()
        chosen, rows = [first], first.part.count
        for other in list(self.waiting):
            rows += other.part.count
            if rows > self.most_rows:
                break
            chosen.append(other)
            other.cancel()
        return chosen
