"""Tokens of plain decoding that come unasked: how many are left, and how they are stopped.

Where no draft is to come, the verifier need not be told after each token to compute the next
one. `Verify.granted` lets it go on by itself, one pass ahead of what it has read; what it
decodes are the tokens that it would be asked for. `Extend` lets it go on for longer before
the granted ones have come to an end. `Revoke` ends that. One token may come after it, which is
announced already and used like any other.
"""

from orchestrator.sequence.actions import Action, ToVerifier
from protocol.messages import Extend, Revoke, VerificationOutcome, Verify

MOST_GRANTED = 64
MOST_UNREAD = 512
"""Of all sequences together: outcomes wait in a queue of bounded length, and if they are not read
the verifier must stop."""


def limit_grant(streams: int, ahead: int) -> int:
    """Return how many tokens may be granted to one of so many requests that run.

    Args:
        streams: requests that run.
        ahead: tokens that this one's answer may have after the next one.
    """
    return min(MOST_GRANTED, max(1, MOST_UNREAD // streams), ahead)


class FreeRun:
    """The free run of one sequence, if there is one."""

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence
        self._round = 0
        """Of the `Verify` that granted it; 0 if none goes on."""
        self._left = 0
        """How many tokens may follow the outcome that comes next."""

    @property
    def goes_on(self) -> bool:
        """Whether there is one that has not been ended."""
        return self._round > 0

    def on_verify(self, verify: Verify) -> None:
        """This was sent: nothing else goes on."""
        self._round, self._left = verify.round if verify.granted else 0, verify.granted

    def on_outcome(self, outcome: VerificationOutcome) -> None:
        """The verifier has answered."""
        self._left -= 1
        if not outcome.goes_on:
            self._round = 0

    def revoke(self) -> list[Action]:
        """End it, if it goes on."""
        number, self._round = self._round, 0
        return [ToVerifier(Revoke(sequence=self._sequence, round=number))] if number else []

    def renew(self, most: int) -> list[Action]:
        """Grant `most` again as soon as half is used, so that the verifier never waits."""
        more = most - self._left
        if more <= 0 or 2 * self._left > most:
            return []
        self._left = most
        return [ToVerifier(Extend(sequence=self._sequence, round=self._round, granted=more))]
