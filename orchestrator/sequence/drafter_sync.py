"""Synchronisation of the drafter with a sequence: its progress, and the messages it needs."""

from orchestrator.sequence.draft import Draft
from orchestrator.sequence.planner import Preparation
from protocol.messages import DraftNow, Prepare, Tokens

_FAR = 8
"""Number of tokens that a drafter processes in a good part of a verification's time."""
_VERY_FAR = 64
"""Number of tokens that a target does not wait for, where both take turns anyway."""

_ASKED_AGAIN = 16
"""A late drafter is awaited only once in this many rounds, until it sends something."""


class DrafterSync:
    """The state of a sequence at the drafter that has it open."""

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence
        self._sent = 0
        """Number of committed tokens that it was sent."""
        self._computed = 0
        """Number of tokens that it was asked to compute, those of a round's draft included."""
        self.awaited: DraftNow | None = None
        """The draft that the target waits for, or waited for last."""
        self._is_drafting = False
        self.is_filling = False
        """True until it has computed the prompt."""

    def on_open(self, tokens: Tokens) -> None:
        """Record that it was sent all tokens except the pending one."""
        self._sent = self._computed = len(tokens) - 1
        self._is_drafting, self.is_filling = False, True

    def is_behind(self, tokens: Tokens, *, in_turn: bool = False) -> bool:
        """Return True if it has too many tokens to process for its draft to be awaited."""
        return len(tokens) - 1 - self._computed > (_VERY_FAR if in_turn else _FAR)

    def is_silent(self, number: int, *, is_late: bool) -> bool:
        """Return True if it should not be awaited after round `number`.

        A drafter that only drafts when awaited has to be asked again some time.

        Args:
            number: number of the round.
            is_late: True if it did not deliver the last time.
        """
        return self.is_filling or (is_late and number % _ASKED_AGAIN > 0)

    @property
    def had_far_to_go(self) -> bool:
        """Return True if the awaited draft starts with tokens that it has to process first."""
        return self.awaited is not None and len(self.awaited.tokens) > _FAR

    def on_last_depth(self) -> None:
        """Record that the requested draft is complete."""
        self._is_drafting = False

    def prepare(self, tokens: Tokens, number: int, draft: Draft, plan: Preparation) -> Prepare:
        """Request branches for the possible outcomes of verifying this draft in round `number`."""
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
        """Request `plan.depth` tokens at once; the last round ended in this row."""
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
        """Cancel a draft that is no longer awaited, in round `number`.

        A drafter continues until a newer message arrives. If it prepares for no outcome, none
        would: it would work during a verification that assumes it to be idle.
        """
        return [self.catch_up(tokens, number)] if self._is_drafting else []

    def catch_up(self, tokens: Tokens, number: int) -> DraftNow:
        """Have it process the committed tokens without drafting, in round `number`."""
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
        """Return the committed tokens that it was not sent yet, and their position."""
        base = self._sent
        self._sent = self._computed = len(tokens) - 1
        return base, tokens[base:-1]
