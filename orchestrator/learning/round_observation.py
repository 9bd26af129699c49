"""What one round showed: what the estimates are fed with."""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.messages import Mode, Origin

LONGEST_DRAFT = 16
"""Draft tokens of a round, if nobody says how many there may be."""


@dataclass(frozen=True)
class RoundObservation:
    """What one round showed."""

    mode: Mode
    by_hand: bool
    """Whether the draft length was fixed: then its speed is not the planner's doing."""
    speculating: bool
    """Whether a drafter worked for it, or beside it."""
    origin: Origin
    """Where its chain came from."""
    confidences: Sequence[float]
    """Of the draft tokens that were verified."""
    accepted: int
    prepared: int
    """How many bonus tokens were prepared for behind the last accepted token."""
    rank: int | None
    """Which of them it was, 0 for the best; None if none of them."""
    verify_ms: float
    idle_ms: float | None
    """Between the verification before and this one; None for a request's first."""
    waited_ms: float = 0.0
    """How long its draft was waited for, as far as the orchestrator saw."""
    longest_draft: int = LONGEST_DRAFT
    """Draft tokens that a round may have."""
    chooses_trees: bool = False
    """Whether it was the planner's choice to ask a drafter for trees or for chains."""
    continues_run: bool = False
    """Whether it followed another one of a free run, so that its pass had begun before."""
    since_last_ms: float | None = None
    """From the request's last tokens to these; None for its first."""
    begun_unasked: bool = False
    """Whether the verifier began it by itself, for the outcome that it was prepared for."""
    sequences: int = 1
    """How many requests shared the pass."""
    all_tokens: int = 0
    """Tokens of all their chains; 0 stands for this chain's own."""
    unverified_lookup: tuple[float, bool] | None = None
    """Confidence of the first token of a lookup that was not verified, and whether it was right."""
    ended_at: float = 0.0
    """In seconds of a monotonic clock."""
    parents: Sequence[int] | None = None
    """Of the draft tokens, as in `sequence.draft`; None is a chain."""
    path: Sequence[int] | None = None
    """The rows of the accepted draft tokens; None: the first ones of a chain."""
    unverified: Sequence[tuple[float, bool]] = ()
    """Confidences of siblings that were not verified though their parents stood, and whether
    they were right."""

    @property
    def tokens(self) -> int:
        """Of the chain or tree."""
        return len(self.confidences) + 1

    @property
    def shape(self) -> Sequence[int]:
        """Per draft token, its parent's row."""
        return range(len(self.confidences)) if self.parents is None else self.parents

    @property
    def late_ms(self) -> float | None:
        """How long the target verified for others before it; None if nobody asked for the round."""
        unasked = self.continues_run or self.begun_unasked
        if self.since_last_ms is None or self.idle_ms is None or unasked:
            return None
        own_ms = max(self.idle_ms, self.waited_ms) + self.verify_ms
        return max(0.0, self.since_last_ms - own_ms)

    @property
    def is_tree(self) -> bool:
        """Whether it was of more than a chain."""
        return list(self.shape) != list(range(len(self.confidences)))

    @property
    def depth(self) -> int:
        """Draft tokens of the longest path."""
        depths = [0]
        for parent in self.shape:
            depths.append(depths[parent] + 1)
        return max(depths)

    @property
    def choices(self) -> list[tuple[list[float], int | None]]:
        """Along the accepted path, what was drafted behind each row and which of it stood.

        Confidences, likeliest first, and a place among them; None where all fell. Without the
        last row if nothing was drafted behind it.
        """
        behind: dict[int, list[int]] = {}
        for row, parent in enumerate(self.shape, 1):
            behind.setdefault(parent, []).append(row)
        path = list(range(1, self.accepted + 1) if self.path is None else self.path)
        found: list[tuple[list[float], int | None]] = []
        for row, following in zip([0, *path], [*path, None], strict=True):
            rows = behind.get(row, [])
            if rows:
                place = rows.index(following) if following is not None else None
                found.append(([self.confidences[r - 1] for r in rows], place))
        return found

    @property
    def ranks(self) -> list[tuple[int | None, int]]:
        """Along the accepted path and behind it, which of the drafter's choices the target's token
        was, None for none of them, and how many are known; without places where none is."""
        found = [(chosen, len(confidences)) for confidences, chosen in self.choices]
        # The bonus token: outcomes are prepared for beside what was drafted there.
        tried = found.pop()[1] if found and found[-1][0] is None else 0
        known = tried + self.prepared
        if known:
            found.append((None if self.rank is None else tried + self.rank, known))
        return found

    @property
    def rows(self) -> int:
        """Tokens of the pass."""
        return self.all_tokens or self.tokens
