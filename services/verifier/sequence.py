"""One sequence at the target: its state, and the expected time of its next verification."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import mlx.core as mx
from msgspec.structs import replace

from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.errors import ProtocolError
from protocol.messages import Extend, Tokens, VerificationOutcome, Verify
from services.engine.pass_handle import PassHandle
from services.engine.scheduler import Submission
from services.kv.state import SequenceState
from services.verifier.acceptance import AcceptanceRule

if TYPE_CHECKING:
    from services.verifier.feature_log import FeatureLog

_UNKNOWN_S = 0.002
"""Assumed time between an outcome and the next verification, for a prepared chain."""
_LEAST_S = 0.002
_MOST_WAITS = 4.0
"""Cap on that time, in longest waits: one long gap, for a prompt or a draft, is soon forgotten."""
_SMOOTHING = 0.3
_FORGIVING = 0.75


@dataclass
class TargetSequence:
    """One sequence at the target: its state, and the committed tokens."""

    state: SequenceState
    rule: AcceptanceRule
    tokens: Tokens
    """The committed tokens."""
    features: "FeatureLog | None" = None
    """Features of the target for a drafter at these tokens."""
    passes: deque[PassHandle] = field(default_factory=deque)
    """The pass that runs, and those started behind it."""
    submitted: Submission | None = None
    """Its part of that pass, unless it was started ahead; it may still wait to run."""
    request: Verify | None = None
    """The verification in progress, or one granted in advance."""
    granted_in: int = 0
    """The round of the message that granted further tokens."""
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

    def choose(self, tree: TokenTree) -> None:
        """Begin the choice of tokens after the pass over a tree, unless the next one began it."""
        head = self.passes[0]
        if head.choice is None and self.rule.is_likeliest:
            head.choice = head.best()
        if head.choice is None and self.request is not None:
            head.choice = self.rule.begin(head.logits, self.request, tree)

    def choose_lazily(self) -> mx.array | None:
        """Begin the choice of the token after the current pass, if it `goes_on`; lazy."""
        head, request = self.passes[0], self.request
        if request is None:
            return None
        choice = self.rule.begin(head.logits, request, read_tree(request.nodes, []))
        head.choice = choice
        return choice

    @property
    def goes_on(self) -> bool:
        """True if its pass is over one token, and another one follows, chosen on the device."""
        request = self.request
        granted = request is not None and request.granted > 0 and len(request.nodes) == 1
        return granted and self.rule.is_on_device

    @property
    def awaits_draft(self) -> bool:
        """True if its next pass is over a tree that is being prepared during this one."""
        return self.request is not None and not (self.request.granted or self.drafter_idle)

    @property
    def is_likeliest(self) -> bool:
        """True if its tokens are the argmax of the unprocessed logits."""
        return self.rule.is_likeliest

    def extend(self, message: Extend) -> None:
        """Grant more tokens in advance, if that run is still in progress."""
        if self.request is not None and self.granted_in == message.round:
            self.request = replace(self.request, granted=self.request.granted + message.granted)

    @property
    def comes_unasked(self) -> bool:
        """True if it will request a pass by itself, in a step or two."""
        if self.request is None:
            return False
        if self.submitted is not None:
            return not self.submitted.waits and self.request.granted > 0
        return True

    def begin_run(self, message: Verify) -> None:
        """Start this verification, and the run that it grants."""
        self.request, self.granted_in = message, message.round
        self.drafter_idle = message.drafter_idle

    def advance_run(self, outcome: VerificationOutcome) -> None:
        """Go on to the token that was granted behind this outcome, if any."""
        if self.request is not None:
            self.request = next_plain(self.request, outcome)
        if self.request is not None:
            self.answered_at = 0.0  # no message is waited for

    def end_run(self) -> None:
        """End the run of granted tokens."""
        self.request = None
        if self.submitted is not None:
            self.submitted.cancel()
            self.submitted = None
        for handle in self.passes:
            handle.cancel()
        self.passes.clear()

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

    def forget_features(self) -> None:
        """Drop the features of running passes, which another drafter requested."""
        if self.submitted is None:
            self.passes.clear()
        for handle in self.passes:
            handle.features = None

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
        if self.submitted or self.passes or not self.answered_at or self.gap_s > longest_s:
            return 0.0
        return self.answered_at + min(longest_s, 2.0 * self.gap_s + _LEAST_S)


def next_plain(message: Verify, outcome: VerificationOutcome) -> Verify | None:
    """Return the expected next request: the bonus token alone, if it has been granted."""
    if not outcome.goes_on:
        return None
    return replace(
        message,
        round=message.round + 1,
        position=message.position + outcome.accepted + 1,
        nodes=[outcome.bonus],
        parents=[],
        distributions=[],
        granted=message.granted - 1,
    )
