"""Time passes over few tokens, as the planner's initial estimates.

Without them the planner assumes the cost of a further token, and tries only lengths that look
worthwhile under that assumption.
"""

import logging
import time

from protocol.errors import RuntimeFailure
from protocol.messages import Parents, PassTimes
from services.runtime.preparation import Steps
from services.verifier.trial_sequence import TrialSequence
from services.verifier.verifier import Verifier

_log = logging.getLogger(__name__)

_PROMPT = list(range(16))
_CHAINS = (1, 4, 8, 2, 16, 3, 6, 32, 10, 12, 24, 5)
"""Numbers of tokens, the most informative first."""
_TREES = (8, 16, 4, 32, 12)
_SWEEPS = 3
"""The least time of this many passes counts, as other processes run, too."""
_BUDGET_S = 0.6
"""After this time in passes no further one starts; the first one always does."""
_MANY, _DEAR = 8, 3.0
"""Larger passes are not measured if this many rows take this many times as long as one."""


def measure_passes(verifier: Verifier, *, drafter_idle: bool) -> Steps[PassTimes]:
    """Time passes after a short text.

    Args:
        verifier: warmed up where passes have to be prepared.
        drafter_idle: as in `Verify`.
    """
    trial = TrialSequence(verifier, drafter_idle=drafter_idle)
    stopwatch = _Stopwatch(trial)
    try:
        while verifier.is_computing:
            yield
        trial.open(_PROMPT)
        trial.verify([])  # a process's first pass takes longer
        yield
        yield from _measure(stopwatch, verifier)
    except RuntimeFailure as error:
        # It starts all the same, and its requests fail.
        _log.warning("passes were not measured: %s", error)
    trial.close()
    chains = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in sorted(stopwatch.chains.items()))
    _log.info("passes by their tokens, in ms: %s", chains)
    return PassTimes(chains=stopwatch.chains, trees=stopwatch.trees)


def _measure(stopwatch: "_Stopwatch", verifier: Verifier) -> Steps[None]:
    taken_s = 0.0
    shapes = [list(range(rows - 1)) for rows in _CHAINS]
    shapes += [[0] * (rows - 1) for rows in _TREES if verifier.takes_trees]
    for _ in range(_SWEEPS):
        for parents in shapes:
            if len(parents) > verifier.max_draft_tokens or stopwatch.is_too_dear(1 + len(parents)):
                continue
            if stopwatch.chains and taken_s >= _BUDGET_S:
                return
            while verifier.is_computing:
                yield
            began = time.monotonic()
            stopwatch.time(parents)
            taken_s += time.monotonic() - began
            yield


class _Stopwatch:
    def __init__(self, trial: TrialSequence) -> None:
        self._trial = trial
        self.chains: dict[int, float] = {}
        """Rows of a chain -> least time in milliseconds."""
        self.trees: dict[int, float] = {}
        """Rows of a tree -> least time in milliseconds."""

    def time(self, parents: Parents) -> None:
        """Verify tokens of this shape, and record the time."""
        least = self.chains if parents == list(range(len(parents))) else self.trees
        rows, taken_ms = 1 + len(parents), self._trial.verify(parents)
        least[rows] = min(least.get(rows, taken_ms), taken_ms)

    def is_too_dear(self, rows: int) -> bool:
        """Return True if this many rows cost too much to be verified, given fewer rows' times."""
        dear = (ms for m, ms in self.chains.items() if rows > m >= _MANY)
        return any(ms > _DEAR * self.chains[1] for ms in dear)
