"""Actions of a sequence: its only effect on the outside."""

from dataclasses import dataclass, field

from protocol.messages import (
    CloseSequence,
    DraftNow,
    Extend,
    FinishReason,
    OpenSequence,
    Prepare,
    Revoke,
    TokenLogprobs,
    TokenOrigin,
    Tokens,
    Verify,
)


@dataclass(frozen=True)
class ToVerifier:
    """Send a message to the verifier."""

    message: OpenSequence | Verify | Revoke | Extend | CloseSequence


@dataclass(frozen=True)
class ToDrafter:
    """Send a message to the drafter."""

    message: OpenSequence | Prepare | DraftNow | CloseSequence


@dataclass(frozen=True)
class Emit:
    """Add tokens to the answer."""

    tokens: Tokens
    origins: list[TokenOrigin]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token, if requested."""


@dataclass(frozen=True)
class Finish:
    """Complete the answer."""

    reason: FinishReason
    error: str = ""


Action = ToVerifier | ToDrafter | Emit | Finish
