"""Limits of an answer, and of one round of it."""

from dataclasses import dataclass, replace

from orchestrator.sequence.draft import Draft
from protocol.messages import FinishReason, Tokens


@dataclass(frozen=True)
class Limits:
    """Limits of an answer."""

    max_tokens: int
    stop_ids: frozenset[int]
    context_length: int
    """0 means unlimited."""
    vocabulary_size: int = 2**31
    """Draft tokens beyond it are never sent to the target."""

    def cut(self, length: int, answered: int, emitted: Tokens) -> tuple[int, FinishReason | None]:
        """Return how many of these tokens belong to the answer, and why it ends, if it does.

        A stop token ends the answer and is not part of it.

        Args:
            length: number of tokens of the sequence so far, prompt included.
            answered: number of them that belong to the answer.
            emitted: the tokens that a verification adds.
        """
        room = self.max_tokens - answered
        space = self.context_length - length if self.context_length else room + 1
        for index, token in enumerate(emitted[: min(room, space)]):
            if token in self.stop_ids:
                return index, "stop"
        if len(emitted) >= space and space <= room:
            return space, "context"
        if len(emitted) >= room:
            return room, "length"
        return len(emitted), None

    def longest_draft(self, length: int, answered: int) -> int:
        """Return the longest draft that can be part of the answer, with a bonus token after it."""
        room = self.max_tokens - answered - 1
        if self.context_length:
            room = min(room, self.context_length - length - 1)
        return max(0, room)

    def is_known(self, token: int) -> bool:
        """Return True if this token is in the vocabulary."""
        return 0 <= token < self.vocabulary_size


@dataclass
class RequestLimits:
    """Limits of one request's answer, its verifier and its drafter.

    Every `length` counts the tokens of the sequence, prompt and pending token included.
    """

    limits: Limits
    prompt_length: int
    has_drafter: bool = False
    drafter_context: int = 0
    """Context length of the drafter; 0 means unlimited."""
    max_draft: int = 0
    """Longest draft that the verifier accepts."""
    verifier_takes_trees: bool = False
    drafter_takes_trees: bool = False

    def set_context(self, context_length: int, length: int) -> str:
        """Set the context length of the target in tokens; 0 means unlimited.

        Returns:
            Why a sequence of this length does not fit; empty if it does.
        """
        self.limits = replace(self.limits, context_length=context_length)
        if 0 < context_length <= length:
            return f"{length} tokens are more than the target takes, {context_length}"
        return ""

    def cut(self, length: int, emitted: Tokens) -> tuple[int, FinishReason | None]:
        """Return how many of these tokens belong to the answer, and why it ends, if it does."""
        return self.limits.cut(length, length - self.prompt_length, emitted)

    def can_draft(self, length: int, depth: int) -> bool:
        """Return True if there is a drafter, with room in its context for a round of this depth."""
        ahead = length + 2 * depth + 1
        return self.has_drafter and not 0 < self.drafter_context < ahead

    def count_ahead(self, length: int) -> int:
        """Return the number of tokens that the answer may have after the next one."""
        return self.limits.longest_draft(length, length - self.prompt_length)

    def longest_draft(self, length: int) -> int:
        """Return the longest draft that can be verified."""
        return min(self.max_draft, self.count_ahead(length))

    @property
    def takes_trees(self) -> bool:
        """True if verifier and drafter both support trees."""
        return self.verifier_takes_trees and self.drafter_takes_trees

    def keep_allowed(self, draft: Draft, rows: list[int], length: int) -> list[int]:
        """Return those of these rows that can be verified, in the order to send them."""
        longest, largest, depths = self.longest_draft(length), draft.largest, draft.depths
        kept = {0}
        for row in rows[: self.max_draft]:
            fits = depths[row] <= longest and self.limits.is_known(largest[row - 1])
            if fits and draft.parents[row - 1] in kept:
                kept.add(row)
        return draft.arrange(kept - {0})
