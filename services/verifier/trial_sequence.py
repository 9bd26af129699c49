"""A synthetic sequence, for passes that prepare a verifier."""

from protocol.messages import (
    CloseSequence,
    OpenSequence,
    Parents,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.runtime.sequence_table import TRIAL_SEQUENCE
from services.verifier.verifier import Verifier

_SHORTEST_MS = 1e-3


class TrialSequence:
    """Verifies chains and trees of a given shape with arbitrary tokens.

    The verifier drops it when it is asked for anything else; the next pass then opens it again.

    Args:
        verifier: has no other work during a pass.
        drafter_idle: as in `Verify`.
    """

    def __init__(self, verifier: Verifier, *, drafter_idle: bool = False) -> None:
        self._verifier, self._drafter_idle = verifier, drafter_idle
        self._position = self._round = 0
        self._prompt: Tokens = []

    def open(self, prompt: Tokens) -> None:
        """Open the sequence, or reopen it, with this text."""
        self._prompt, self._position = prompt, len(prompt)
        opening = OpenSequence(sequence=TRIAL_SEQUENCE, tokens=prompt, sampling=Sampling())
        for _ in self._verifier.handle(opening):
            pass

    def verify(self, parents: Parents) -> float:
        """Verify a pending token and the draft tokens after it; returns milliseconds."""
        if not self._verifier.has_open(TRIAL_SEQUENCE):
            self.open(self._prompt)
        self._round += 1
        message = Verify(
            sequence=TRIAL_SEQUENCE,
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
        for _ in self._verifier.handle(CloseSequence(sequence=TRIAL_SEQUENCE)):
            pass
