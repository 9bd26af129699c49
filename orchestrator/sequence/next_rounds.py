"""The rounds that follow from outcomes."""

from orchestrator.sequence.draft import Draft
from orchestrator.sequence.free_run import limit_grant
from orchestrator.sequence.limits import RequestLimits
from orchestrator.sequence.lookup import PromptLookup
from orchestrator.sequence.planner import Planner, Preparation
from orchestrator.sequence.round import NextRound, Round
from protocol.decoding.prompt_lookup import LONGEST_LOOKUP
from protocol.messages import LogitsOptions, Origin, Tokens, VerificationOutcome, Verify


class NextRounds:
    """Turns the planner's decisions, within the limits, into the messages of rounds.

    Every `length` counts a sequence's tokens, including the pending one of the round in question.
    """

    def __init__(
        self,
        sequence: int,
        planner: Planner,
        limits: RequestLimits,
        options: LogitsOptions | None,
    ) -> None:
        self._sequence, self._planner, self._limits = sequence, planner, limits
        self._lookup = PromptLookup(options)

    def can_speculate(self, length: int) -> bool:
        """Return True if a draft can be made and verified, and the answer has room for it."""
        limits = self._limits
        return limits.longest_draft(length) > 0 and limits.can_draft(length, self._planner.depth)

    def speculates(self, length: int) -> bool:
        """Return True if the planner wants a draft, and one can be made and verified."""
        return self._planner.should_speculate and self.can_speculate(length)

    def choose(self, draft: Draft, length: int, origin: Origin) -> list[int]:
        """Return the rows of a draft that are worth verifying, and can be."""
        takes_trees = self._limits.verifier_takes_trees
        rows = self._planner.choose_nodes(draft, origin, takes_trees=takes_trees)
        return self._limits.keep_allowed(draft, rows, length)

    @property
    def siblings(self) -> int:
        """Number of alternatives to request from the drafter for each token."""
        return self._planner.siblings if self._limits.takes_trees else 0

    def plan_preparation(self, current: Round) -> tuple[Draft, Preparation]:
        """Decide what to prepare during a round, and which of its draft tokens to send."""
        draft = current.draft
        if not self._limits.drafter_takes_trees:
            draft = draft.pick(draft.main)  # these rows come first, so outcomes keep their numbers
        plan = self._planner.plan_preparation(draft, current.origin)
        return draft, plan._replace(siblings=self.siblings)

    def find_lookup(self, tokens: Tokens) -> Draft:
        """Return earlier continuations of the tokens; empty if they would not be used.

        With a fixed draft length, an available drafter drafts instead.
        """
        planner = self._planner
        if not planner.looks_up or (planner.num_draft_tokens and self._limits.has_drafter):
            return Draft()
        siblings = planner.siblings if self._limits.verifier_takes_trees else 0
        longest = planner.num_draft_tokens or planner.max_draft_tokens or LONGEST_LOOKUP
        return self._lookup.find(tokens, longest, siblings)

    def choose_lookup(self, lookup: Draft, length: int, *, alone: bool) -> Draft:
        """Return the part of a lookup that is worth verifying; `alone`: no drafter works
        meanwhile.
        """
        rows = self._planner.choose_lookup(lookup, alone=alone)
        worth = lookup.pick(lookup.arrange(rows))
        return worth.pick(self.choose(worth, length, "lookup"))

    def find_better(self, current: Round, tokens: Tokens) -> bool:
        """Return True if a lookup is worth ending a free run; another request would miss a pass."""
        if self._planner.estimates.streams > 1:
            return False
        lookup = current.unverified_lookup = self.find_lookup(tokens)
        possible = lookup.pick(self.choose(lookup, len(tokens), "lookup"))
        return self._planner.value_of_stopping(possible) > 0.0

    def plan(
        self, number: int, length: int, pending: int, draft: Draft, origin: Origin
    ) -> NextRound:
        """Plan the round of this number, with as much of a draft as pays."""
        rows = self.choose(draft, length, origin)
        chosen, planner = draft.pick(rows), self._planner
        speculates = self.speculates(length)
        # The drafter of a request is ready after its first round; after a lookup that was worth
        # verifying, or has a fixed length, there may be another one.
        awaits = planner.should_speculate and number == 1
        by_hand = planner.num_draft_tokens > 0 and not self._limits.has_drafter
        by_hand = by_hand and planner.should_speculate
        goes_on = not (speculates or awaits or by_hand or len(chosen))
        granted = self.count_grant(length) if goes_on else 0
        verify = Verify(
            sequence=self._sequence,
            round=number,
            position=length - 1,
            nodes=[pending, *chosen.tokens],
            parents=chosen.sent_parents,
            distributions=chosen.drawn_from,
            granted=granted,
            stop_ids=sorted(self._limits.limits.stop_ids) if granted else [],
            drafter_idle=not (speculates and planner.prepares),
        )
        return NextRound(chosen, draft, rows, verify)

    def count_grant(self, length: int) -> int:
        """Return how many free-running tokens to grant."""
        return limit_grant(self._planner.estimates.streams, self._limits.count_ahead(length))

    def find(self, current: Round, outcome: VerificationOutcome, length: int) -> NextRound | None:
        """Return the round with the draft that was prepared for this outcome; None on a miss."""
        draft = current.cache.draft(outcome.row, outcome.bonus)
        if not draft or not self.can_speculate(length):
            return None
        return self.plan(outcome.round + 1, length, outcome.bonus, draft, "hit")
