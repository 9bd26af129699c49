"""What one round showed: what the estimates are fed with."""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.messages import Mode, Origin

LONGEST_DRAFT = 16
"""Draft tokens of a round, if nothing else limits them."""


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
    beside: bool = True
    """Whether the drafter worked during the pass."""
    waited_ms: float = 0.0
    """How long its draft was waited for, as far as the orchestrator saw."""
    continues_run: bool = False
    """Whether it followed another one of a free run, so that its pass had begun before."""
    since_last_ms: float | None = None
    """From the request's last tokens to these; None for its first."""
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

    @property
    def depth(self) -> int:
        """Draft tokens of the longest path."""
        depths = [0]
        for parent in self._shape:
            depths.append(depths[parent] + 1)
        return max(depths)

    @property
    def choices(self) -> list[tuple[float, bool]]:
        """The drafter's first choices that were judged: confidence, and whether each stood."""
        first = self._first_children
        path = self._accepted_path
        return [
            (self.confidences[first[row] - 1], first[row] == following)
            for row, following in zip([0, *path], [*path, None], strict=True)
            if row in first
        ]

    @property
    def all_stood(self) -> bool:
        """Whether no draft token followed the last accepted one."""
        return [0, *self._accepted_path][-1] not in self._first_children

    @property
    def rows(self) -> int:
        """Tokens of the pass."""
        return self.all_tokens or len(self.confidences) + 1

    @property
    def _shape(self) -> Sequence[int]:
        """Per draft token, its parent's row."""
        return range(len(self.confidences)) if self.parents is None else self.parents

    @property
    def _accepted_path(self) -> list[int]:
        return list(range(1, self.accepted + 1) if self.path is None else self.path)

    @property
    def _first_children(self) -> dict[int, int]:
        first: dict[int, int] = {}
        for row, parent in enumerate(self._shape, 1):
            first.setdefault(parent, row)
        return first
