"""How long passes over few tokens take, measured at load: what the planner starts from.

Without that it assumes what a further token costs, and tries only lengths that this makes look
worth their time.
"""

import logging
import time

from protocol.errors import RuntimeFailure
from protocol.messages import Parents, PassTimes
from services.verifier.trial_sequence import TrialSequence
from services.verifier.verifier import Verifier

_log = logging.getLogger(__name__)

_PROMPT = [token % 16 for token in range(64)]
_CHAINS = (1, 4, 8, 2, 16, 3, 6, 32, 10, 12, 24, 5)
"""Numbers of tokens, the most telling first."""
_TREES = (8, 16, 4, 32, 12)
_SWEEPS = 3
"""The least of so many passes counts: other processes are at work, too."""
_BUDGET_S = 0.6
"""After so long no further pass begins; the first one always does."""
_MANY, _DEAR = 8, 3.0
"""More rows than these are not measured if these take so many times what one takes."""


def measure_passes(verifier: Verifier, *, drafter_idle: bool) -> PassTimes:
    """Time passes behind a short text. What it leaves in the prefix cache is of no use.

    Args:
        verifier: warmed up where passes have to be prepared.
        drafter_idle: as in `Verify`.
    """
    trial = TrialSequence(verifier, drafter_idle=drafter_idle)
    stopwatch = _Stopwatch(trial)
    try:
        trial.open(_PROMPT)
        trial.verify([])  # a process's first pass takes longer
        _measure(stopwatch, verifier)
    except RuntimeFailure as error:
        # It starts all the same, and its requests fail.
        _log.warning("passes were not measured: %s", error)
    trial.close()
    chains = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in sorted(stopwatch.chains.items()))
    _log.info("passes by their tokens, in ms: %s", chains)
    return PassTimes(chains=stopwatch.chains, trees=stopwatch.trees)


def _measure(stopwatch: "_Stopwatch", verifier: Verifier) -> None:
    ends_at = time.monotonic() + _BUDGET_S
    shapes = [list(range(rows - 1)) for rows in _CHAINS]
    shapes += [[0] * (rows - 1) for rows in _TREES if verifier.takes_trees]
    for _ in range(_SWEEPS):
        for parents in shapes:
            if len(parents) > verifier.max_draft_tokens or stopwatch.is_too_dear(1 + len(parents)):
                continue
            if stopwatch.chains and time.monotonic() >= ends_at:
                return
            stopwatch.time(parents)


class _Stopwatch:
    def __init__(self, trial: TrialSequence) -> None:
        self._trial = trial
        self.chains: dict[int, float] = {}
        """The least time of so many rows, in milliseconds."""
        self.trees: dict[int, float] = {}
        """The same of trees."""

    def time(self, parents: Parents) -> None:
        """Verify tokens of this shape, and note how long that takes."""
        least = self.chains if parents == list(range(len(parents))) else self.trees
        rows, taken_ms = 1 + len(parents), self._trial.verify(parents)
        least[rows] = min(least.get(rows, taken_ms), taken_ms)

    def is_too_dear(self, rows: int) -> bool:
        """Whether so many rows will not be verified, as fewer take several passes' time."""
        dear = (ms for m, ms in self.chains.items() if rows > m >= _MANY)
        return any(ms > _DEAR * self.chains[1] for ms in dear)
