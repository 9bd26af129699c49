"""One sequence at the target: its state, and the expected time of its next verification."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.errors import ProtocolError
from protocol.messages import Extend, Tokens, VerificationOutcome, Verify
from services.batching.forward import BatchRequest, ForwardPass
from services.kernels.cuda.host_rows import ReadRows
from services.kv.state import SequenceState
from services.verifier.acceptance import AcceptanceRule
from services.verifier.feature_log import FeatureLog, Rows
from services.verifier.pipelined_step import PipelinedStep, SharedStep, next_plain
from services.verifier.prelaunch import PrelaunchedPass

Step = PipelinedStep | SharedStep
"""A step of a pass that has started ahead."""

_UNKNOWN_S = 0.002
"""Assumed time between an outcome and the next verification, for a prepared chain."""
_LEAST_S = 0.002
_MOST_WAITS = 4.0
"""Cap on that time, in longest waits: one long gap, for a prompt or a draft, is soon forgotten."""
_SMOOTHING = 0.3
_FORGIVING = 0.75
_LONGEST_WAIT = 0.3
"""Longest wait for the other sequences of the last pass, as a share of its time.

Two passes in place of one cost far more.
"""


@dataclass
class TargetSequence:
    """One sequence at the target: its state, and the committed tokens."""

    state: SequenceState
    rule: AcceptanceRule
    tokens: Tokens
    """The committed tokens."""
    features: FeatureLog | None = None
    """Features of the target for a drafter at these tokens."""
    read: ReadRows | None = None
    """[rows, width] features of the current pass, lazy."""
    ahead: list[Step] = field(default_factory=list)
    """Steps of passes started ahead."""
    taken: Step | PrelaunchedPass | None = None
    """Its step in the current pass, if that had started ahead."""
    begun: mx.array | npt.NDArray[np.int32] | None = None
    """[1] the lazy choice after the current pass, if the next one has started with it."""
    best: Callable[[], npt.NDArray[np.int32]] | None = None
    """The argmax tokens of the current pass (`BatchRequest.best`)."""
    asked: Verify | None = None
    """The verification in progress, or one granted in advance."""
    granted_in: int = 0
    """The round of the message that granted further tokens."""
    request: BatchRequest | None = None
    """The verification that waits for a pass."""
    drafter_idle: bool = False
    """True if no draft was prepared during its last verification."""
    answered_at: float = 0.0
    """Time of its last outcome."""
    gap_s: float = _UNKNOWN_S
    """Usual time from an outcome to its next verification."""

    @property
    def length(self) -> int:
        """Number of tokens committed or in a pass."""
        return self.state.length

    def validate(self, message: Verify, most_rows: int, *, takes_trees: bool) -> TokenTree:
        """Return the tree to be verified.

        Args:
            message: the request.
            most_rows: maximum for a verification.
            takes_trees: True if it may branch.

        Raises:
            ProtocolError: it cannot be verified here.
        """
        if message.position != self.length:
            raise ProtocolError(
                f"the chain starts at position {message.position} "
                f"but the KV holds {self.length} tokens"
            )
        if not 1 <= len(message.nodes) <= most_rows:
            raise ProtocolError(f"cannot verify a chain of {len(message.nodes)} tokens")
        tree = read_tree(message.nodes, message.parents)
        if not (tree.is_chain or takes_trees):
            raise ProtocolError("this verifier takes chains, no trees")
        self.rule.check(message, tree)
        return tree

    def _part_in(self, by: ForwardPass) -> Step | PrelaunchedPass | BatchRequest | None:
        """Return its step in a pass that is running."""
        parts = (self.taken, *self.ahead, self.request)
        return next((part for part in parts if part is not None and part.by is by), None)

    def row_in(self, by: ForwardPass) -> int | None:
        """Return its first row of this pass; None if it has none."""
        part = self._part_in(by)
        return None if part is None else part.row

    def logits_in(self, by: ForwardPass) -> mx.array | None:
        """Return [own rows, vocabulary] logits of this pass, lazy."""
        part = self._part_in(by)
        return None if part is None else part.logits

    def take_ahead(self, chain: Tokens) -> Step | None:
        """Return the pass started ahead, if it is over this chain."""
        step = self.ahead.pop(0) if self.ahead else None
        if step is not None and step.take_up(chain) is None:
            step = None
            self.ahead.clear()  # they were built on it
        self.taken = step
        return step

    def begin_choice(
        self, logits: mx.array, message: Verify, tree: TokenTree
    ) -> mx.array | npt.NDArray[np.int32] | None:
        """Begin the choice of tokens; see `AcceptanceRule.begin`."""
        begun, self.begun = self.begun, None
        return begun if begun is not None else self.rule.begin(logits, message, tree, self.best)

    def extend(self, message: Extend) -> None:
        """Grant more tokens in advance, if that run is still in progress."""
        if self.asked is not None and self.granted_in == message.round:
            self.asked = replace(self.asked, granted=self.asked.granted + message.granted)

    @property
    def comes_unasked(self) -> bool:
        """True if it will request a pass by itself, in a step or two."""
        if self.asked is None or self.request is None:
            return self.asked is not None
        return self.request.is_computed and self.asked.granted > 0

    def begin_run(self, message: Verify) -> None:
        """Start this verification, and the run that it grants."""
        self.asked, self.granted_in = message, message.round
        self.drafter_idle = message.drafter_idle

    def advance_run(self, outcome: VerificationOutcome) -> None:
        """Go on to the token that was granted behind this outcome, if any."""
        if self.asked is not None:
            self.asked = next_plain(self.asked, outcome)
        if self.asked is not None:
            self.answered_at = 0.0  # no message is waited for

    def end_run(self) -> None:
        """End the run of granted tokens."""
        self.asked = self.taken = self.begun = None
        self.ahead.clear()

    def begin(self, tree: TokenTree | None) -> Tokens:
        """Begin a pass over these new tokens, if any; return those to be fed before them."""
        owed = self.tokens[len(self.tokens) - self.state.owed :]
        if tree is None or tree.is_chain:
            self.state.append(len(tree) if tree is not None else 0)
        else:
            self.state.append_tree(tree)
        return owed

    def commit(self, tree: TokenTree, rows: Sequence[int]) -> None:
        """End the pass over a tree, committing these rows."""
        tokens = [tree.tokens[row] for row in rows]
        if tree.is_chain:
            self.state.commit(len(self.tokens) + len(tokens))
        else:
            self.state.commit_rows(rows)
        self.tokens += tokens

    def take_read(self, places: Sequence[int]) -> Rows | None:
        """Return the features at these rows of the pass, a path."""
        rows, self.read = self.read, None
        if rows is None:
            return None
        # On the host: on a GPU picking some of them would be a separate launch to wait for.
        return np.asarray(rows)[list(places)]

    def forget_features(self) -> None:
        """Drop the features of running passes, which another drafter requested."""
        self.ahead.clear()
        if self.request is not None:
            self.request.features = None

    def on_verify(self, now: float, busy_since: float, longest_s: float) -> None:
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
        if self.request is not None or not self.answered_at or self.gap_s > longest_s:
            return 0.0
        return self.answered_at + min(longest_s, 2.0 * self.gap_s + _LEAST_S)


def find_longest_wait(last: ForwardPass) -> float:
    """Return the longest worthwhile wait, in seconds, for the sequences of the last pass.

    It is 0 until that pass has ended.
    """
    return _LONGEST_WAIT * max(0.0, last.ended - last.started)
