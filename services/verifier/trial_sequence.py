"""A synthetic sequence, for passes that are computed at load."""

from protocol.messages import (
    CloseSequence,
    OpenSequence,
    Parents,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.verifier.verifier import Verifier

_SEQUENCE = 0
"""The orchestrator numbers its sequences from 1."""
_SHORTEST_MS = 1e-3


class TrialSequence:
    """Verifies chains and trees of a given shape with arbitrary tokens.

    Args:
        verifier: has no other sequence.
        drafter_idle: as in `Verify`.
    """

    def __init__(self, verifier: Verifier, *, drafter_idle: bool = False) -> None:
        self._verifier, self._drafter_idle = verifier, drafter_idle
        self._position = self._round = 0

    def open(self, prompt: Tokens) -> None:
        """Open the sequence, or reopen it, with this text."""
        self._position = len(prompt)
        opening = OpenSequence(sequence=_SEQUENCE, tokens=prompt, sampling=Sampling())
        for _ in self._verifier.handle(opening):
            pass

    def verify(self, parents: Parents) -> float:
        """Verify a pending token and the draft tokens after it; returns milliseconds."""
        self._round += 1
        message = Verify(
            sequence=_SEQUENCE,
            round=self._round,
            position=self._position,
            nodes=list(range(1 + len(parents))),
            parents=parents,
            drafter_idle=self._drafter_idle,
        )
        taken_ms = _SHORTEST_MS
        for answer in self._verifier.handle(message):
            if isinstance(answer, VerificationOutcome):
                self._position += answer.accepted + 1
                taken_ms = max(taken_ms, answer.verify_ms)
        return taken_ms

    def close(self) -> None:
        """Close the sequence; the prefix cache may keep its tokens."""
        for _ in self._verifier.handle(CloseSequence(sequence=_SEQUENCE)):
            pass
