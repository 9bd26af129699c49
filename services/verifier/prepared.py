"""Rounds that are prepared for outcomes that nobody has read yet (`protocol.messages.VerifyAhead`).

What is begun is what the orchestrator would ask for in a moment: the tokens do not depend on it.
"""

from protocol.messages import PreparedRound, VerificationOutcome, Verify, VerifyAhead
from protocol.transport.codec import Decoder

_VERIFY: Decoder[Verify] = Decoder(Verify)


class PreparedRounds:
    """What may follow one round of one sequence."""

    def __init__(self) -> None:
        self._round = 0
        """The one that they follow."""
        self._rounds: dict[tuple[int, int], PreparedRound] = {}

    def add(self, message: VerifyAhead) -> None:
        """Take these in; what was prepared for an earlier round is of no use any more."""
        if message.round < self._round:
            return
        if message.round > self._round:
            self._round, self._rounds = message.round, {}
        for one in message.rounds:
            if one.number:
                self._rounds[one.row, one.bonus] = one
            else:
                self._rounds.pop((one.row, one.bonus), None)

    def take(self, outcome: VerificationOutcome) -> tuple[int, Verify] | None:
        """The number of what is prepared for this outcome, and what it asks for.

        Raises:
            ProtocolError: it is no message.
        """
        found = self._rounds.get((outcome.row, outcome.bonus))
        if outcome.round != self._round or found is None:
            return None
        self._rounds = {}
        return found.number, _VERIFY.decode(found.verify)

    def __len__(self) -> int:
        return len(self._rounds)
