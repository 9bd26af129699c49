"""Free runs: tokens of plain decoding that the verifier decodes without being asked for each.

If no draft is expected, the verifier need not be told to compute each next token. `Verify.granted`
lets it continue by itself, one pass ahead of the tokens it has read; it decodes the tokens that it
would otherwise be asked for. `Extend` grants more before the granted ones are used up. `Revoke`
ends the run. One more token, already announced, may arrive after it, and is used like any other.
"""

from orchestrator.sequence.actions import Action, ToVerifier
from protocol.messages import Extend, Revoke, VerificationOutcome, Verify

MOST_GRANTED = 512
"""Limit for all sequences together: outcomes wait in a bounded queue, and if they are not read
the verifier must stop.
"""


def limit_grant(streams: int, ahead: int) -> int:
    """Return the tokens to grant to each of `streams` running requests, at most `ahead`."""
    return min(max(1, MOST_GRANTED // streams), ahead)


class FreeRun:
    """The free run of one sequence, if there is one."""

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence
        self._round = 0
        """Round of the `Verify` that granted it; 0 if there is none."""
        self._left = 0
        """Number of tokens that may follow the next outcome."""

    @property
    def goes_on(self) -> bool:
        """True while there is a run."""
        return self._round > 0

    def on_verify(self, verify: Verify) -> None:
        """Record a `Verify` that was sent: its grant, if any, replaces the run before."""
        self._round, self._left = verify.round if verify.granted else 0, verify.granted

    def on_outcome(self, outcome: VerificationOutcome) -> None:
        """Record an outcome of the verifier."""
        self._left -= 1
        if not outcome.goes_on:
            self._round = 0

    def revoke(self) -> list[Action]:
        """End the run, if there is one."""
        number, self._round = self._round, 0
        return [ToVerifier(Revoke(sequence=self._sequence, round=number))] if number else []

    def renew(self, most: int) -> list[Action]:
        """Fill the grant up to `most` again once half is used, so that the verifier never waits."""
        more = most - self._left
        if more <= 0 or 2 * self._left > most:
            return []
        self._left = most
        return [ToVerifier(Extend(sequence=self._sequence, round=self._round, granted=more))]
