"""How far a round of a request may go: the answer's limits, both models' limits, the plan's."""

from dataclasses import dataclass, replace

from orchestrator.sequence.limits import Limits
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.speculation_cache import Draft
from protocol.messages import FinishReason, Origin, Tokens


@dataclass
class Reach:
    """Every `length` counts the tokens of the sequence, prompt and pending token included."""

    limits: Limits
    plan: Planner
    prompt_length: int
    has_drafter: bool = False
    drafter_context: int = 0
    """What the drafter can attend to; 0 means unlimited."""
    max_draft: int = 0
    """Longest draft that the verifier takes."""

    def limit_context(self, context_length: int) -> None:
        """The target can attend to so many tokens; 0 means unlimited."""
        self.limits = replace(self.limits, context_length=context_length)

    def ending(self, length: int, emitted: Tokens) -> tuple[int, FinishReason | None]:
        """How many of these tokens belong to the answer, and why it ends if it does."""
        return self.limits.ending(length, length - self.prompt_length, emitted)

    def can_draft(self, length: int) -> bool:
        """Whether there is a drafter, and room in its context for one more round."""
        ahead = length + 2 * self.plan.depth + 1
        return self.has_drafter and not 0 < self.drafter_context < ahead

    def can_speculate(self, length: int) -> bool:
        """Whether a draft can be made, and verified."""
        return self.can_draft(length) and self.longest(length) > 0

    def lasts(self, length: int) -> bool:
        """Whether the answer may have more than one token from here on."""
        return self.limits.room(length, length - self.prompt_length) > 0

    def longest(self, length: int) -> int:
        """Longest draft that can be verified."""
        return min(self.max_draft, self.limits.room(length, length - self.prompt_length))

    def clip(self, draft: Draft, length: int, origin: Origin) -> Draft:
        """As much of the draft as is worth verifying, and can be."""
        worth = self.plan.length(draft.confidences, origin)
        return draft.first(min(worth, self.longest(length), self.limits.speakable(draft.largest)))
