"""How far the drafter knows a sequence, and the messages that bring it up to date."""

from orchestrator.sequence.draft import Draft
from orchestrator.sequence.planner import Preparation
from protocol.messages import DraftNow, Prepare, Tokens

_FAR = 8
"""Tokens that a drafter takes in, in a good part of a verification's time."""

_ASKED_AGAIN = 16
"""A drafter that was late is waited for after one round of so many, until it sends something."""


class DrafterSync:
    """For the one drafter that has the sequence open."""

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence
        self._sent = 0
        """Committed tokens that it knows of."""
        self._computed = 0
        """Tokens that it has been asked to compute, those of a round's draft included."""
        self.awaited: DraftNow | None = None
        """The draft that the target waits for, or waited for last."""
        self._is_drafting = False
        self.is_filling = False
        """Whether it has not computed the prompt yet."""

    def on_open(self, tokens: Tokens) -> None:
        """It was sent all tokens but the pending one."""
        self._sent = self._computed = len(tokens) - 1
        self._is_drafting, self.is_filling = False, True

    def is_behind(self, tokens: Tokens) -> bool:
        """Whether it has too much to take in for its draft to be waited for."""
        return len(tokens) - 1 - self._computed > _FAR

    def is_silent(self, number: int, *, is_late: bool) -> bool:
        """Whether it should not be waited for after round `number`.

        One that only drafts when it is waited for has to be asked again some time.

        Args:
            number: of the round.
            is_late: whether it did not deliver the last time.
        """
        return self.is_filling or (is_late and number % _ASKED_AGAIN > 0)

    def on_last_depth(self) -> None:
        """The draft that it was asked for is complete."""
        self._is_drafting = False

    def prepare(self, tokens: Tokens, number: int, draft: Draft, plan: Preparation) -> Prepare:
        """Ask for branches for what the verification of this draft in round `number` may bring."""
        base, fresh = self._take_unsent(tokens)
        self._is_drafting = False
        self._computed += 1 + len(draft)
        return Prepare(
            sequence=self._sequence,
            round=number,
            base=base,
            tokens=fresh,
            nodes=[tokens[-1], *draft.tokens],
            parents=draft.sent_parents,
            fan_out=plan.fan_out,
            depth=plan.depth,
            held_back=plan.held_back,
            siblings=plan.siblings,
        )

    def draft_now(self, tokens: Tokens, number: int, row: int, plan: Preparation) -> DraftNow:
        """Ask for `plan.depth` tokens at once; the last round ended in this row."""
        base, fresh = self._take_unsent(tokens)
        self._is_drafting = True
        self.awaited = DraftNow(
            sequence=self._sequence,
            round=number,
            base=base,
            tokens=fresh,
            pending=tokens[-1],
            accepted=row,
            count=plan.depth,
            held_back=plan.held_back,
            siblings=plan.siblings,
        )
        return self.awaited

    def stop(self, tokens: Tokens, number: int) -> list[DraftNow]:
        """End a draft that is not waited for any more, in round `number`.

        A drafter goes on until something newer comes, and where it prepares for no outcome nothing
        else would: it would work beside a verification that takes it to be idle.
        """
        return [self.catch_up(tokens, number)] if self._is_drafting else []

    def catch_up(self, tokens: Tokens, number: int) -> DraftNow:
        """Have it take in what was committed, and draft nothing, in round `number`."""
        base, fresh = self._take_unsent(tokens)
        self._is_drafting = False
        return DraftNow(
            sequence=self._sequence,
            round=number,
            base=base,
            tokens=fresh,
            pending=tokens[-1],
            accepted=0,
            count=0,
        )

    def _take_unsent(self, tokens: Tokens) -> tuple[int, Tokens]:
        """Return the committed tokens that it was not sent yet, and where they start."""
        base = self._sent
        self._sent = self._computed = len(tokens) - 1
        return base, tokens[base:-1]
