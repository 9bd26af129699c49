"""What one round does: the modes `ar`, `sd` and `ssd` are one pipeline with different plans."""

from dataclasses import dataclass
from typing import Literal

from orchestrator.fan_out import allocate
from protocol.messages import Mode

Backup = Literal["draft", "plain"]
"""After a miss: let the drafter draft while the target waits, or verify the bonus alone."""


@dataclass(frozen=True)
class Plan:
    """The knobs of a request; defaults were measured on the default pair (README)."""

    mode: Mode
    lookahead: int = 0
    """Draft tokens per round; 0 picks the mode's default."""
    budget: int = 0
    """Branches prepared per round (B); 0 picks the default."""
    backup: Backup = "draft"
    backup_tokens: int = 3
    """Draft tokens asked for after a miss."""
    alpha: float = 0.6
    """Prior of the acceptance rate, for the fan-out."""
    miss_exponent: float = 0.5
    """Prior of r in the miss law 1 - p_hit(F) = F^-r."""

    @property
    def depth(self) -> int:
        """Draft tokens per round."""
        return self.lookahead or 4

    @property
    def branches(self) -> int:
        """Branches prepared per round."""
        return self.budget or 12

    def fan_out(self, drafted: int) -> list[int]:
        """F_0..F_K for a chain with `drafted` draft tokens."""
        return allocate(self.alpha, self.miss_exponent, self.branches, drafted)
