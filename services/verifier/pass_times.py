"""How long passes over few tokens take, measured at load: what the planner starts from.

Without that it assumes what a further token costs, and tries only lengths that this makes look
worth their time.
"""

import logging
import time

from protocol.errors import RuntimeFailure
from protocol.messages import (
    CloseSequence,
    OpenSequence,
    Parents,
    PassTimes,
    Sampling,
    VerificationOutcome,
    Verify,
)
from services.verifier.verifier import Verifier

_log = logging.getLogger(__name__)

_SEQUENCE = 0
"""The orchestrator numbers its sequences from 1."""
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
_SHORTEST_MS = 1e-3


def measure_passes(verifier: Verifier, *, drafter_idle: bool) -> PassTimes:
    """Time passes behind a short text. What it leaves in the prefix cache is of no use.

    Args:
        verifier: warmed up where passes have to be prepared.
        drafter_idle: as in `Verify`.
    """
    stopwatch = _Stopwatch(verifier, drafter_idle=drafter_idle)
    try:
        stopwatch.open()
        _measure(stopwatch, verifier)
    except RuntimeFailure as error:
        # It starts all the same, and its requests fail.
        _log.warning("passes were not measured: %s", error)
    stopwatch.close()
    chains = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in sorted(stopwatch.chains.items()))
    _log.info("passes by their tokens, in ms: %s", chains)
    return PassTimes(chains=stopwatch.chains, trees=stopwatch.trees)


def _measure(stopwatch: "_Stopwatch", verifier: Verifier) -> None:
    ends_at = time.monotonic() + _BUDGET_S
    shapes = [list(range(rows - 1)) for rows in _CHAINS]
    shapes += [[0] * (rows - 1) for rows in _TREES if verifier.takes_trees]
    stopwatch.verify([])  # a process's first pass takes longer
    for _ in range(_SWEEPS):
        for parents in shapes:
            if len(parents) > verifier.max_draft_tokens or stopwatch.is_too_dear(1 + len(parents)):
                continue
            if stopwatch.chains and time.monotonic() >= ends_at:
                return
            stopwatch.time(parents)


class _Stopwatch:
    def __init__(self, verifier: Verifier, *, drafter_idle: bool) -> None:
        self._verifier, self._drafter_idle = verifier, drafter_idle
        self.chains: dict[int, float] = {}
        """The least time of so many rows, in milliseconds."""
        self.trees: dict[int, float] = {}
        """The same of trees."""
        self._position = len(_PROMPT)
        self._round = 0

    def open(self) -> None:
        """Begin the text."""
        opening = OpenSequence(sequence=_SEQUENCE, tokens=_PROMPT, sampling=Sampling())
        for _ in self._verifier.handle(opening):
            pass

    def time(self, parents: Parents) -> None:
        """Verify tokens of this shape, and note how long that takes."""
        least = self.chains if parents == list(range(len(parents))) else self.trees
        rows, taken_ms = 1 + len(parents), self.verify(parents)
        least[rows] = min(least.get(rows, taken_ms), taken_ms)

    def verify(self, parents: Parents) -> float:
        """How long that takes, in milliseconds."""
        self._round += 1
        message = Verify(
            sequence=_SEQUENCE,
            round=self._round,
            position=self._position,
            nodes=list(range(1 + len(parents))),
            parents=parents,
            drafter_idle=self._drafter_idle,
        )
        taken_ms = _SHORTEST_MS
        for answer in self._verifier.handle(message):
            if isinstance(answer, VerificationOutcome):
                self._position += answer.accepted + 1
                taken_ms = max(taken_ms, answer.verify_ms)
        return taken_ms

    def is_too_dear(self, rows: int) -> bool:
        """Whether so many rows will not be verified, as fewer take several passes' time."""
        dear = (ms for m, ms in self.chains.items() if rows > m >= _MANY)
        return any(ms > _DEAR * self.chains[1] for ms in dear)

    def close(self) -> None:
        for _ in self._verifier.handle(CloseSequence(sequence=_SEQUENCE)):
            pass
