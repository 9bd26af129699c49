"""Tokens of plain decoding that come unasked: how many are granted, and how they are stopped.

Where no draft is to come, the verifier need not be told after each token to compute the next
one. `Verify.granted` lets it go on by itself, one pass ahead of what it has read; what it
decodes are the tokens that it would be asked for. `Extend` lets it go on for longer before
the granted ones have come to an end. `Revoke` ends that. One token may come after it, which is
announced already and used like any other.
"""

from orchestrator.sequence.actions import Action, ToVerifier
from orchestrator.sequence.limits import RoundLimits
from orchestrator.sequence.lookup import LookupDrafts
from orchestrator.sequence.lookup_value import may_stop, value_of_stopping
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.round import Round
from protocol.messages import Extend, Revoke, Tokens, VerificationOutcome, Verify

MOST_GRANTED = 64
MOST_UNREAD = 512
"""Of all sequences together: outcomes wait in a queue of bounded length, and if nobody reads them
the verifier must stop."""


class FreeRun:
    """The free run of one sequence, if there is one."""

    def __init__(
        self, sequence: int, planner: Planner, limits: RoundLimits, lookups: LookupDrafts
    ) -> None:
        self._sequence, self._planner = sequence, planner
        self._limits, self._lookups = limits, lookups
        self._round = 0
        """Of the `Verify` that granted it; 0 if none goes on."""
        self._left = 0
        """How many tokens may follow the outcome that comes next."""

    def count_granted(self, number: int, length: int, drafted: int, *, speculates: bool) -> int:
        """How many tokens may follow a round unasked.

        None where a draft is to come: behind a lookup that was worth verifying, or of a fixed
        length, there may be another one, and the drafter of a request comes after its first round.

        Args:
            number: of the round.
            length: tokens of the sequence, the pending one included.
            drafted: draft tokens that the round verifies.
            speculates: whether a draft is prepared beside it.
        """
        awaits_drafter = self._planner.mode != "ar" and number == 1
        looks_up = self._planner.should_speculate and self._lookups.drafts_by_hand
        if speculates or drafted or awaits_drafter or looks_up:
            return 0
        return self._count_most(length)

    def _count_most(self, length: int) -> int:
        share = max(1, MOST_UNREAD // self._planner.estimates.batch.streams)
        return min(MOST_GRANTED, share, self._limits.count_ahead(length))

    def on_verify(self, verify: Verify) -> None:
        """This was sent: nothing else goes on."""
        self._round, self._left = verify.round if verify.granted else 0, verify.granted

    def on_outcome(self, outcome: VerificationOutcome) -> None:
        """The verifier has answered."""
        self._left -= 1
        if not outcome.goes_on:
            self._round = 0

    def check(self, current: Round, tokens: Tokens, *, speculates: bool) -> list[Action]:
        """End it, once, if there is something better to do; else let it go on.

        Args:
            current: the round in flight.
            tokens: of the sequence, the pending one included.
            speculates: whether drafts could be prepared.
        """
        if not self._round:
            return []
        if speculates or self._finds_lookup(current, tokens):
            return self.revoke()
        return self._renew(len(tokens))

    def revoke(self) -> list[Action]:
        """End it, if it goes on."""
        number, self._round = self._round, 0
        return [ToVerifier(Revoke(sequence=self._sequence, round=number))] if number else []

    def _renew(self, length: int) -> list[Action]:
        """Grant more as soon as half of what may be is used, so that the verifier never waits."""
        most = self._count_most(length)
        more = most - self._left
        if more <= 0 or 2 * self._left > most:
            return []
        self._left = most
        return [ToVerifier(Extend(sequence=self._sequence, round=self._round, granted=more))]

    def _finds_lookup(self, current: Round, tokens: Tokens) -> bool:
        """Whether one is worth the stop; not while plain decoding is to be measured."""
        planner = self._planner
        if not (planner.should_speculate or planner.is_paused) or not may_stop(planner):
            return False
        found = current.unverified_lookup = self._lookups.find(tokens)
        possible = found.pick(self._limits.choose(found, len(tokens), "lookup"))
        return value_of_stopping(planner, possible) > 0.0
