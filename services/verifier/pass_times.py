"""Passes that prepare a verifier: first ones of every shape on a GPU, and timed ones.

A GPU compiles or plans its kernels when it first sees a shape; a round that pays for that takes ten
times as long and misleads the planner's estimates. Without times the planner assumes the cost of a
further token, and tries only lengths that look worthwhile under that assumption.
"""

import logging
import time

from protocol.decoding.token_tree import CHAIN_ROWS, TREE_ROWS
from protocol.errors import RuntimeFailure
from protocol.messages import (
    CloseSequence,
    OpenSequence,
    Parents,
    PassTimes,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.runtime.preparation import Steps, unless_broken
from services.runtime.sequence_table import TRIAL_SEQUENCE
from services.verifier.verifier import Verifier

_log = logging.getLogger(__name__)

_PROMPT = list(range(16))
_CHAINS = (1, 4, 8, 2, 16, 3, 6, 32, 10, 12, 24, 5)
"""Numbers of tokens, the most informative first."""
_RUN = 2
"""Tokens of plain decoding that are granted behind a timed one."""
_SWEEPS = 3
"""The least time of this many passes counts, as other processes run, too."""
_BUDGET_S = 0.75
"""After this time in passes no further one starts; the first one always does."""
_MANY, _DEAR = 8, 3.0
"""Larger passes are not measured if this many rows take this many times as long as one."""
_SHORTEST_MS = 1e-3
_WARM_PROMPT = list(range(1, 17))
_LONGEST = 8
"""Longest warmed-up chain of draft tokens; longer ones are rare."""
_LONG_PROMPT = [token % 16 for token in range(640)]
"""A prompt of common length; passes of all sizes are computed after it, traced or not."""


class TrialSequence:
    """Verifies chains and trees of a given shape with arbitrary tokens.

    The verifier drops it when it is asked for anything else; the next pass then opens it again.

    Args:
        verifier: has no other work during a pass.
        drafter_idle: as in `Verify`.
    """

    def __init__(self, verifier: Verifier, *, drafter_idle: bool = False) -> None:
        self._verifier, self._drafter_idle = verifier, drafter_idle
        self._position = self._round = 0
        self._prompt: Tokens = []

    def open(self, prompt: Tokens) -> None:
        """Open the sequence, or reopen it, with this text."""
        self._prompt, self._position = prompt, len(prompt)
        opening = OpenSequence(sequence=TRIAL_SEQUENCE, tokens=prompt, sampling=Sampling())
        for _ in self._verifier.handle(opening):
            pass

    def verify(self, parents: Parents, *, granted: int = 0) -> float:
        """Verify a pending token and the draft tokens after it; returns milliseconds.

        With `granted` tokens of plain decoding behind it, those of the fastest one.
        """
        if not self._verifier.has_open(TRIAL_SEQUENCE):
            self.open(self._prompt)
        self._round += 1
        message = Verify(
            sequence=TRIAL_SEQUENCE,
            round=self._round,
            position=self._position,
            nodes=list(range(1 + len(parents))),
            parents=parents,
            drafter_idle=self._drafter_idle,
            granted=granted,
        )
        times_ms: list[float] = []
        for answer in self._verifier.handle(message):
            if isinstance(answer, VerificationOutcome):
                self._position += answer.accepted + 1
                self._round = answer.round
                times_ms.append(answer.verify_ms)
        return max(_SHORTEST_MS, min(times_ms, default=0.0))

    def close(self) -> None:
        """Close the sequence; the prefix cache may keep its tokens."""
        for _ in self._verifier.handle(CloseSequence(sequence=TRIAL_SEQUENCE)):
            pass


def warm_verifier(verifier: Verifier) -> Steps[None]:
    """Prefill and verify a chain of each length; after a long prompt all sizes, and trees."""
    trial = TrialSequence(verifier)
    with unless_broken():
        for drafted in range(min(_LONGEST, verifier.max_draft_tokens) + 1):
            trial.open(_WARM_PROMPT)
            trial.verify(list(range(drafted)))
            yield
        if verifier.takes_trees:
            trial.open(_LONG_PROMPT)
            chains = [list(range(rows - 1)) for rows in CHAIN_ROWS]
            for parents in [*chains, *([0] * (rows - 1) for rows in TREE_ROWS)]:
                yield
                trial.verify(parents)
    trial.close()


def measure_passes(verifier: Verifier, *, drafter_idle: bool) -> Steps[PassTimes]:
    """Time passes after a short text; the least time of each size counts.

    Args:
        verifier: warmed up where passes have to be prepared.
        drafter_idle: as in `Verify`.
    """
    trial = TrialSequence(verifier, drafter_idle=drafter_idle)
    times = PassTimes()
    try:
        while verifier.is_computing:
            yield
        trial.open(_PROMPT)
        trial.verify([])  # a process's first pass takes longer
        yield
        yield from _measure(trial, verifier, times)
    except RuntimeFailure as error:
        # It starts all the same, and its requests fail.
        _log.warning("passes were not measured: %s", error)
    trial.close()
    chains = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in sorted(times.chains.items()))
    _log.info("passes by their tokens, in ms: %s", chains)
    return times


def _measure(trial: TrialSequence, verifier: Verifier, times: PassTimes) -> Steps[None]:
    """Time chains, a few times each."""
    taken_s, chains = 0.0, times.chains
    for rows in _CHAINS * _SWEEPS:
        if rows > 1 + verifier.max_draft_tokens or _is_too_dear(chains, rows):
            continue
        if chains and taken_s >= _BUDGET_S:
            return
        while verifier.is_computing:
            yield
        began = time.monotonic()
        taken_ms = _time(trial, verifier, rows)
        chains[rows] = min(chains.get(rows, taken_ms), taken_ms)
        taken_s += time.monotonic() - began
        yield


def _time(trial: TrialSequence, verifier: Verifier, rows: int) -> float:
    """Return the milliseconds of a pass, launched before its tokens are known where rounds' are."""
    prelauncher, parents = verifier.scheduler.prelauncher, list(range(rows - 1))
    granted = _RUN if rows == 1 else 0  # plain decoding goes on by itself
    if prelauncher is not None:
        prelauncher.forget()
        trial.verify(parents, granted=granted)  # launches the next one
    return trial.verify(parents, granted=granted)


def _is_too_dear(chains: dict[int, float], rows: int) -> bool:
    """Return True if this many rows cost too much to be verified, given fewer rows' times."""
    dear = (ms for fewer, ms in chains.items() if rows > fewer >= _MANY)
    return any(ms > _DEAR * chains[1] for ms in dear)
