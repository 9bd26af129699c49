"""What the drafter has been told of a sequence, and the messages that tell it the rest."""

from orchestrator.sequence.planner import Planner
from orchestrator.sequence.round import Round
from protocol.messages import DraftNow, Prepare, Tokens


class DrafterSync:
    """For the one drafter that has the sequence open."""

    def __init__(self, sequence: int, plan: Planner) -> None:
        self._sequence = sequence
        self._plan = plan
        self._told = 0  # committed tokens that it knows of

    def opened(self, tokens: Tokens) -> None:
        """It was told all tokens but the pending one."""
        self._told = len(tokens) - 1

    def prepare(self, tokens: Tokens, number: int, current: Round) -> Prepare:
        """Prepare for what round `number` may end with."""
        base, news = self._news(tokens)
        return Prepare(
            sequence=self._sequence,
            round=number,
            base=base,
            tokens=news,
            chain=current.chain,
            fan_out=self._plan.fan_out(current.draft.confidences, current.origin),
            depth=self._plan.depth,
            held_back=self._plan.held_back,
        )

    def draft_now(self, tokens: Tokens, number: int, accepted: int, count: int) -> DraftNow:
        """Draft `count` tokens at once; the last round accepted `accepted`."""
        base, news = self._news(tokens)
        return DraftNow(
            sequence=self._sequence,
            round=number,
            base=base,
            tokens=news,
            pending=tokens[-1],
            accepted=accepted,
            count=count,
            held_back=self._plan.held_back,
        )

    def _news(self, tokens: Tokens) -> tuple[int, Tokens]:
        """The committed tokens that it has not been told, and where they start."""
        base = self._told
        self._told = len(tokens) - 1
        return base, tokens[base:-1]
