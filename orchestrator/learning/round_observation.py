"""The observation of one round, from which estimates are updated."""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.messages import Mode, Origin

LONGEST_DRAFT = 16
"""Draft tokens of a round, if nothing else limits them."""


@dataclass(frozen=True)
class RoundObservation:
    """The observation of one round."""

    mode: Mode
    by_hand: bool
    """True if the draft length was fixed: its speed does not reflect the planner's choices."""
    speculating: bool
    """True if a drafter worked for it, or during it."""
    origin: Origin
    """Origin of its chain."""
    confidences: Sequence[float]
    """Confidences of the verified draft tokens."""
    accepted: int
    prepared: int
    """Number of bonus tokens prepared after the last accepted token."""
    rank: int | None
    """Rank of the bonus token among them, 0 for the best; None if it was not among them."""
    verify_ms: float
    idle_ms: float | None
    """Time between the previous verification and this one; None for a request's first."""
    is_contended: bool = True
    """True if the drafter worked during the pass."""
    waited_ms: float = 0.0
    """Time waited for its draft, as measured by the orchestrator."""
    continues_run: bool = False
    """True if it followed another round of a free run, so that its pass started earlier."""
    since_last_ms: float | None = None
    """Time from the request's previous tokens to these; None for its first."""
    sequences: int = 1
    """Number of requests that shared the pass."""
    all_tokens: int = 0
    """Tokens of all their chains; 0 means this chain's only."""
    unverified_lookup: tuple[float, bool] | None = None
    """Confidence of the first token of a lookup that was not verified, and whether it was right."""
    ended_at: float = 0.0
    """Time in seconds of a monotonic clock."""
    parents: Sequence[int] | None = None
    """Parents of the draft tokens, as in `sequence.draft`; None is a chain."""
    path: Sequence[int] | None = None
    """Rows of the accepted draft tokens; None: the first ones of a chain."""

    @property
    def depth(self) -> int:
        """Draft tokens of the longest path."""
        depths = [0]
        for parent in self._shape:
            depths.append(depths[parent] + 1)
        return max(depths)

    @property
    def choices(self) -> list[tuple[float, bool]]:
        """The judged first choices of the drafter: confidence, and True if accepted."""
        first = self._first_children
        path = self._accepted_path
        return [
            (self.confidences[first[row] - 1], first[row] == following)
            for row, following in zip([0, *path], [*path, None], strict=True)
            if row in first
        ]

    @property
    def all_stood(self) -> bool:
        """True if no draft token followed the last accepted one."""
        return [0, *self._accepted_path][-1] not in self._first_children

    @property
    def rows(self) -> int:
        """Number of tokens of the pass."""
        return self.all_tokens or len(self.confidences) + 1

    @property
    def _shape(self) -> Sequence[int]:
        """Row of the parent of each draft token."""
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
