"""Theorem 7: an upper bound on the tokens per second, in which no wait is wasted."""

from dataclasses import dataclass


@dataclass
class Rounds:
    """Totals of rounds of one kind."""

    count: int = 0
    tokens: int = 0
    verify_ms: float = 0.0

    def add(self, tokens: int, verify_ms: float) -> None:
        """Add a round that brought `tokens` tokens."""
        self.count += 1
        self.tokens += tokens
        self.verify_ms += verify_ms


def upper_bound_tok_s(hit: Rounds, miss: Rounds, backup_ms: float) -> float:
    """[p E_hit + (1-p) E_miss] / [p T_v + (1-p) (T_v + T_b)], in tokens per second.

    Each T_v is the mean over the lengths that were verified in such rounds; with sums in place of
    means p cancels. The bound leaves out messages and the wait for a tree.

    Args:
        hit: rounds whose draft was ready in time.
        miss: all other rounds.
        backup_ms: total time of drafting while the target waited.
    """
    milliseconds = hit.verify_ms + miss.verify_ms + backup_ms
    return 1e3 * (hit.tokens + miss.tokens) / milliseconds if milliseconds else 0.0
