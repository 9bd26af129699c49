"""Who hangs: how long each service has been silent, and how long it may be.

A service's working thread says something at least once a second, except within one
indivisible call: a verification, a chunk of a prefill. How long such a call takes depends
on the model and the machine, so the limit follows the slowest one seen; the first call may
also compile kernels and read weights. Time during which this process itself did not run
(stopped, swapped out) counts for nobody. Pure: told what happened and when.
"""

from dataclasses import dataclass

_SLOWER = 4.0
"""A call may take this many times as long as the slowest before it."""

_LONGEST_STEP_S = 1.0
"""More than this between two looks means that we were not awake ourselves."""


@dataclass
class _Watched:
    silent_s: float = 0.0
    slowest_s: float = 0.0
    worked: bool = False


class HangDetector:
    """Watches over services, by their address."""

    def __init__(self, hang_timeout_s: float, first_timeout_s: float) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._first_timeout_s = max(first_timeout_s, hang_timeout_s)
        self._watched: dict[bytes, _Watched] = {}
        self._looked: float | None = None

    def begin(self, address: bytes) -> None:
        """A service has shaken hands."""
        self._watched[address] = _Watched()

    def end(self, address: bytes) -> None:
        """It is not watched any more."""
        self._watched.pop(address, None)

    def heard(self, address: bytes, *, worked: bool) -> None:
        """It said something; `worked`: this was the result of work, not a mere sign of life."""
        watched = self._watched.get(address)
        if watched is not None:
            watched.slowest_s = max(watched.slowest_s, watched.silent_s)
            watched.silent_s = 0.0
            watched.worked = watched.worked or worked

    def silent_s(self, address: bytes) -> float:
        """Seconds since its last word."""
        watched = self._watched.get(address)
        return watched.silent_s if watched is not None else 0.0

    def limit_s(self, address: bytes) -> float:
        """How long it may be silent."""
        watched = self._watched[address]
        if not watched.worked:
            return self._first_timeout_s
        return min(self._first_timeout_s, max(self._hang_timeout_s, _SLOWER * watched.slowest_s))

    def look(self, now: float) -> list[bytes]:
        """Let time pass; those who have been silent for too long."""
        step = 0.0 if self._looked is None else min(now - self._looked, _LONGEST_STEP_S)
        self._looked = now
        for watched in self._watched.values():
            watched.silent_s += step
        return [a for a, watched in self._watched.items() if watched.silent_s > self.limit_s(a)]
