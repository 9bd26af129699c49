"""What a sequence wants done: the only way in which it touches the world."""

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
    """Send this to the verifier."""

    message: OpenSequence | Verify | Revoke | Extend | CloseSequence


@dataclass(frozen=True)
class ToDrafter:
    """Send this to the drafter."""

    message: OpenSequence | Prepare | DraftNow | CloseSequence


@dataclass(frozen=True)
class PrecomputeVerify:
    """If the verification in flight ends with this outcome, `verify` will follow: get it ready."""

    row: int
    """Of the last accepted node."""
    bonus: int
    verify: Verify


@dataclass(frozen=True)
class Emit:
    """These tokens are part of the answer."""

    tokens: Tokens
    origins: list[TokenOrigin]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token, if asked for."""


@dataclass(frozen=True)
class Finish:
    """The answer is complete."""

    reason: FinishReason
    error: str = ""


Action = ToVerifier | ToDrafter | PrecomputeVerify | Emit | Finish
