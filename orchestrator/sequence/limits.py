"""Where an answer ends, and how far one round of it may go."""

from dataclasses import dataclass, replace

from orchestrator.sequence.planner import Planner
from orchestrator.sequence.speculation_cache import Draft
from protocol.messages import FinishReason, Origin, Tokens


@dataclass(frozen=True)
class Limits:
    """What bounds an answer."""

    max_tokens: int
    stop_ids: frozenset[int]
    context_length: int
    """0 means unlimited."""
    vocabulary_size: int = 2**31
    """A drafter's token beyond it is never sent to the target."""

    def cut(self, length: int, answered: int, emitted: Tokens) -> tuple[int, FinishReason | None]:
        """How many of these tokens belong to the answer, and why it ends with them if it does.

        A stop token ends the answer and is not part of it.

        Args:
            length: tokens of the sequence so far, prompt included.
            answered: how many of them are the answer's.
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
        """Longest draft that can still be part of the answer, with a bonus token behind it."""
        room = self.max_tokens - answered - 1
        if self.context_length:
            room = min(room, self.context_length - length - 1)
        return max(0, room)

    def count_known(self, tokens: Tokens) -> int:
        """How many of the first of these tokens are in the vocabulary."""
        wrong = (i for i, token in enumerate(tokens) if not 0 <= token < self.vocabulary_size)
        return next(wrong, len(tokens))


@dataclass
class RoundLimits:
    """The answer's limits, both models' limits and the plan's, for one request.

    Every `length` counts the tokens of the sequence, prompt and pending token included.
    """

    limits: Limits
    planner: Planner
    prompt_length: int
    has_drafter: bool = False
    drafter_context: int = 0
    """What the drafter can attend to; 0 means unlimited."""
    max_draft: int = 0
    """Longest draft that the verifier takes."""

    def set_context(self, context_length: int) -> None:
        """Set what the target can attend to, in tokens; 0 means unlimited."""
        self.limits = replace(self.limits, context_length=context_length)

    def cut(self, length: int, emitted: Tokens) -> tuple[int, FinishReason | None]:
        """How many of these tokens belong to the answer, and why it ends if it does."""
        return self.limits.cut(length, length - self.prompt_length, emitted)

    def can_draft(self, length: int) -> bool:
        """Whether there is a drafter, and room in its context for one more round."""
        ahead = length + 2 * self.planner.depth + 1
        return self.has_drafter and not 0 < self.drafter_context < ahead

    def can_speculate(self, length: int) -> bool:
        """Whether a draft can be made, and verified."""
        return self.can_draft(length) and self.longest_draft(length) > 0

    def goes_on(self, length: int) -> bool:
        """Whether the answer may have more than one token from here on."""
        return self.limits.longest_draft(length, length - self.prompt_length) > 0

    def longest_draft(self, length: int) -> int:
        """Longest draft that can be verified."""
        room = self.limits.longest_draft(length, length - self.prompt_length)
        return min(self.max_draft, room)

    def clip(self, draft: Draft, length: int, origin: Origin) -> Draft:
        """As much of the draft as is worth verifying, and can be."""
        worth = self.planner.verify_length(draft.confidences, origin)
        known = self.limits.count_known(draft.largest)
        return draft.first(min(worth, self.longest_draft(length), known))
