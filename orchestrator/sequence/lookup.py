"""Prompt lookup as a draft: earlier continuations of the last tokens, as a tree."""

from orchestrator.sequence.draft import Draft
from protocol.decoding.logits_processor import BannedTokens
from protocol.decoding.prompt_lookup import find_continuations
from protocol.messages import LogitsOptions, Tokens


class PromptLookup:
    """Finds drafts that need no drafter.

    Tokens banned by a bias are not proposed; tokens that a grammar forbids are left out by the
    verifier. Under the rejection rule the proposals are deterministic: a function of the preceding
    tokens.
    """

    def __init__(self, options: LogitsOptions | None) -> None:
        self._bans = BannedTokens(options)

    def find(self, tokens: Tokens, longest: int, siblings: int = 0) -> Draft:
        """Return up to `longest` tokens that followed the ending of `tokens`."""
        continuation, parents, confidences = find_continuations(
            tokens, longest, 1 + siblings, self._bans.count_allowed
        )
        return Draft(continuation, confidences, parents=parents)
