"""One sequence at the target: its request, and the run of tokens that it grants."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
from msgspec.structs import replace

from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.errors import ProtocolError
from protocol.messages import Extend, VerificationOutcome, Verify
from services.engine.scheduler import Scheduled
from services.verifier.acceptance import AcceptanceRule

if TYPE_CHECKING:
    from services.verifier.feature_log import FeatureLog


@dataclass(kw_only=True)
class TargetSequence(Scheduled):
    """One sequence at the target: its state, and the committed tokens."""

    rule: AcceptanceRule
    features: "FeatureLog | None" = None
    """Features of the target for a drafter at these tokens."""
    request: Verify | None = None
    """The verification in progress, or one granted in advance."""
    granted_in: int = 0
    """The round of the message that granted further tokens."""

    def validate(self, message: Verify, most_rows: int, *, takes_trees: bool) -> TokenTree:
        """Return the tree to be verified.

        Args:
            message: the request.
            most_rows: maximum for a verification.
            takes_trees: True if it may branch.

        Raises:
            ProtocolError: it cannot be verified here.
        """
        if message.position != self.state.length:
            raise ProtocolError(
                f"the chain starts at position {message.position} "
                f"but the KV holds {self.state.length} tokens"
            )
        if not 1 <= len(message.nodes) <= most_rows:
            raise ProtocolError(f"cannot verify a chain of {len(message.nodes)} tokens")
        tree = read_tree(message.nodes, message.parents)
        if not (tree.is_chain or takes_trees):
            raise ProtocolError("this verifier takes chains, no trees")
        self.rule.check(message, tree)
        return tree

    @property
    def granted(self) -> int | None:
        """Number of further tokens that may follow; None without a request."""
        return None if self.request is None else self.request.granted

    @property
    def goes_on(self) -> bool:
        """True if a token is verified, and another follows, chosen on the device."""
        request = self.request
        granted = request is not None and request.granted > 0 and len(request.nodes) == 1
        return granted and self.rule.is_on_device

    @property
    def is_likeliest(self) -> bool:
        """True if its tokens are the argmax of the unprocessed logits."""
        return self.rule.is_likeliest

    def begin_choice(self, logits: mx.array, tree: TokenTree | None) -> mx.array | None:
        """Begin the choice after a tree, or the requested token; None if the host chooses."""
        if self.request is None:
            return None
        return self.rule.begin(logits, self.request, tree or read_tree(self.request.nodes, []))

    def begin_run(self, message: Verify) -> None:
        """Start this verification, and the run that it grants."""
        self.request, self.granted_in = message, message.round
        self.drafter_idle = message.drafter_idle

    def extend(self, message: Extend) -> None:
        """Grant more tokens in advance, if that run is still in progress."""
        if self.request is not None and self.granted_in == message.round:
            self.request = replace(self.request, granted=self.request.granted + message.granted)

    def advance_run(self, outcome: VerificationOutcome) -> None:
        """Go on to the token that was granted behind this outcome, if any."""
        if self.request is not None:
            self.request = next_plain(self.request, outcome)
        if self.request is not None:
            self.answered_at = 0.0  # no message is waited for

    def end_run(self) -> None:
        """End the run of granted tokens."""
        self.request = None
        self.drop_passes()

    def forget_features(self) -> None:
        """Drop the features of running passes, which another drafter requested."""
        if self.submitted is None:
            self.passes.clear()
        for handle in self.passes:
            handle.features = None


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
