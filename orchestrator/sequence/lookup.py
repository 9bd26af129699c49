"""Prompt lookup as a draft: what followed these tokens before, a branch where places differ."""

from orchestrator.sequence.draft import Draft
from orchestrator.sequence.limits import RoundLimits
from orchestrator.sequence.lookup_value import choose_lookup
from orchestrator.sequence.planner import Planner
from protocol.decoding.logits_processor import BannedTokens
from protocol.decoding.prompt_lookup import find_continuations
from protocol.messages import LogitsOptions, Tokens


class LookupDrafts:
    """Drafts of one sequence that cost no drafter.

    What a bias rules out is not proposed; what a grammar forbids the verifier leaves out. Under
    the rejection rule these are named tokens, a function of those before them.
    """

    def __init__(
        self, planner: Planner, limits: RoundLimits, options: LogitsOptions | None
    ) -> None:
        self._planner, self._limits = planner, limits
        self._bans = BannedTokens(options)

    @property
    def drafts_by_hand(self) -> bool:
        """True if lookups are verified at a fixed length: no drafter is there to draft it."""
        return bool(self._planner.num_draft_tokens) and not self._limits.has_drafter

    def find(self, tokens: Tokens) -> Draft:
        """Find what followed the ending of `tokens`; none where a drafter drafts a fixed length."""
        planner = self._planner
        if planner.num_draft_tokens and self._limits.has_drafter:
            return Draft()
        most = 1 + (planner.affordable_siblings if self._limits.verifies_trees else 0)
        found = find_continuations(tokens, planner.depth, most, self._bans.count_allowed)
        draft = Draft()
        for token, parent, confidence in zip(*found, strict=True):
            draft.add(token, confidence, parent=parent)
        return draft

    def choose(self, found: Draft, length: int, *, alone: bool) -> Draft:
        """What is worth verifying behind `length` tokens; `alone`: no drafter works beside."""
        worth = found.pick(found.arrange(choose_lookup(self._planner, found, alone=alone)))
        return worth.pick(self._limits.choose(worth, length, "lookup"))
