"""How far the drafter knows a sequence, and the messages that bring it up to date."""

from orchestrator.sequence.planner import Planner
from orchestrator.sequence.round import Round
from protocol.messages import DraftNow, Prepare, Tokens


class DrafterSync:
    """For the one drafter that has the sequence open."""

    def __init__(self, sequence: int, planner: Planner) -> None:
        self._sequence = sequence
        self._planner = planner
        self._sent = 0
        """Committed tokens that it knows of."""

    def on_open(self, tokens: Tokens) -> None:
        """It was sent all tokens but the pending one."""
        self._sent = len(tokens) - 1

    def prepare(self, tokens: Tokens, number: int, current: Round) -> Prepare:
        """Ask for branches for what round `number` may end with."""
        base, fresh = self._take_unsent(tokens)
        return Prepare(
            sequence=self._sequence,
            round=number,
            base=base,
            tokens=fresh,
            chain=current.chain,
            fan_out=self._planner.fan_out(current.draft.confidences, current.origin),
            depth=self._planner.depth,
            held_back=self._planner.held_back,
        )

    def draft_now(self, tokens: Tokens, number: int, accepted: int, count: int) -> DraftNow:
        """Ask for `count` tokens at once; the last round accepted `accepted`."""
        base, fresh = self._take_unsent(tokens)
        return DraftNow(
            sequence=self._sequence,
            round=number,
            base=base,
            tokens=fresh,
            pending=tokens[-1],
            accepted=accepted,
            count=count,
            held_back=self._planner.held_back,
        )

    def _take_unsent(self, tokens: Tokens) -> tuple[int, Tokens]:
        """The committed tokens that it was not sent yet, and where they start."""
        base = self._sent
        self._sent = len(tokens) - 1
        return base, tokens[base:-1]
