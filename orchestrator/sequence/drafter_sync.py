"""How far the drafter knows a sequence, and the messages that bring it up to date."""

from collections.abc import Sequence

from orchestrator.sequence.limits import RoundLimits
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.round import Round
from protocol.messages import DraftNow, Prepare, Tokens

_FAR = 8
"""Tokens that a drafter takes in, and looks back on, in a good part of a verification's time."""

_ASKED_AGAIN = 16
"""One that was late is waited for after one round of so many, until it sends something."""


class DrafterSync:
    """For the one drafter that has the sequence open."""

    def __init__(self, sequence: int, planner: Planner) -> None:
        self._sequence = sequence
        self._planner = planner
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
        """Whether it has so much to take in that nobody should wait for its draft."""
        return len(tokens) - 1 - self._computed > _FAR

    def is_silent(self, number: int) -> bool:
        """Whether nobody should wait for it after round `number`, welcome as its drafts are.

        Drafts whose length is fixed are wanted whatever they cost.
        """
        if self._planner.num_draft_tokens:
            return False
        # One that only drafts when it is waited for has to be asked again some time.
        late = self._planner.estimates.drafter_is_late and number % _ASKED_AGAIN > 0
        return self.is_filling or late

    def on_last_depth(self) -> None:
        """The draft that it was asked for is complete."""
        self._is_drafting = False

    def follow(
        self, tokens: Tokens, number: int, current: Round, limits: RoundLimits, *, speculates: bool
    ) -> Sequence[Prepare | DraftNow]:
        """Choose what to send to it as round `number` begins.

        Args:
            tokens: of the sequence, the pending one included.
            number: of the round.
            current: the round.
            limits: of its drafts.
            speculates: whether drafts could be prepared.
        """
        is_ssd = self._planner.mode == "ssd"
        if speculates and is_ssd and self.is_behind(tokens):
            return [self.catch_up(tokens, number)]
        if not (is_ssd and current.speculating):
            stops = self.stop(tokens, number)
            return stops if limits.has_drafter else []
        current.asked = self.prepare(tokens, number, current, limits)
        return [current.asked]

    def prepare(self, tokens: Tokens, number: int, current: Round, limits: RoundLimits) -> Prepare:
        """Ask for branches for what round `number` may end with."""
        base, fresh = self._take_unsent(tokens)
        self._is_drafting = False
        draft = current.draft
        if not limits.drafter_takes_trees and not draft.is_chain:
            # Its rows come first (`Draft.arrange`), so that outcomes keep their numbers.
            draft = draft.pick(draft.main)
        self._computed += 1 + len(draft)
        return Prepare(
            sequence=self._sequence,
            round=number,
            base=base,
            tokens=fresh,
            nodes=current.nodes[: len(draft) + 1],
            parents=draft.sent_parents,
            fan_out=self._planner.fan_out(draft, current.origin),
            depth=self._depth_beside(1 + len(draft)),
            held_back=self._planner.held_back,
            siblings=limits.siblings,
            grown_siblings=limits.grown_siblings,
        )

    def _depth_beside(self, rows: int) -> int:
        """How deep branches are prepared beside a verification of so many rows.

        No deeper than gets done meanwhile: a drafter hears of a miss between two depths only, and
        the core of one that is done can help the target.
        """
        planner, estimates = self._planner, self._planner.estimates
        if planner.num_draft_tokens or estimates.batch.streams > 1:
            return planner.depth
        time_ms = estimates.verify_latency.of(rows) + estimates.idle_ms["hit"].value
        fits = estimates.step_latency.depths_in(time_ms, planner.branches)
        return planner.depth if fits is None else max(1, min(planner.depth, fits))

    def draft_now(
        self, tokens: Tokens, number: int, row: int, count: int, limits: RoundLimits
    ) -> DraftNow:
        """Ask for `count` tokens at once; the last round ended in this row."""
        base, fresh = self._take_unsent(tokens)
        self._is_drafting = True
        self.awaited = DraftNow(
            sequence=self._sequence,
            round=number,
            base=base,
            tokens=fresh,
            pending=tokens[-1],
            accepted=row,
            count=count,
            held_back=self._planner.held_back,
            siblings=limits.siblings,
            grown_siblings=limits.grown_siblings,
        )
        return self.awaited

    def stop(self, tokens: Tokens, number: int) -> list[DraftNow]:
        """End a draft that nobody waits for any more, in round `number`.

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
        """The committed tokens that it was not sent yet, and where they start."""
        base = self._sent
        self._sent = self._computed = len(tokens) - 1
        return base, tokens[base:-1]
