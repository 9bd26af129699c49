"""Prompt lookup as a draft: what followed these tokens before, a branch where places differ."""

from orchestrator.sequence.draft import Draft
from protocol.decoding.logits_processor import BannedTokens
from protocol.decoding.prompt_lookup import find_continuations
from protocol.messages import LogitsOptions, Tokens


class PromptLookup:
    """Finds drafts that cost no drafter.

    What a bias rules out is not proposed; what a grammar forbids the verifier leaves out. Under
    the rejection rule these are named tokens, a function of those before them.
    """

    def __init__(self, options: LogitsOptions | None) -> None:
        self._bans = BannedTokens(options)

    def find(self, tokens: Tokens, longest: int, siblings: int = 0) -> Draft:
        """Return up to `longest` tokens that followed the ending of `tokens`."""
        continuations = find_continuations(tokens, longest, 1 + siblings, self._bans.count_allowed)
        draft = Draft()
        for token, parent, confidence in zip(*continuations, strict=True):
            draft.add(token, confidence, parent=parent)
        return draft
