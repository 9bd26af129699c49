"""Hang detection: how long each service has been silent, and how long it may be.

A service's working thread sends something at least once a second, except during one indivisible
call: a verification, or a chunk of a prefill. The duration of such a call depends on the model and
the machine, so the limit follows the slowest call so far; the first call may also compile kernels
and read weights. Time during which this process itself did not run (stopped, swapped out) does not
count. Pure: every time is an argument.
"""

from dataclasses import dataclass

_SLOWER = 4.0
"""A call may take this many times as long as the slowest call before it."""

_LONGEST_STEP_S = 1.0
"""A longer gap between two updates means that this process itself was suspended."""


@dataclass
class _Watched:
    first_timeout_s: float
    silent_s: float = 0.0
    slowest_s: float = 0.0
    has_worked: bool = False
    announced_s: float = 0.0
    """How long the service said that its current call may take."""


class HangDetector:
    """Watches services by their address."""

    def __init__(
        self,
        hang_timeout_s: float,
        first_timeout_s: float,
        longest_step_s: float = _LONGEST_STEP_S,
    ) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._longest_step_s = longest_step_s
        self._first_timeout_s = max(first_timeout_s, hang_timeout_s)
        self._watched: dict[bytes, _Watched] = {}
        self._updated_at: float | None = None

    def watch(self, address: bytes, first_timeout_s: float | None = None) -> None:
        """Start to watch a service, optionally with a separate limit for its first work."""
        longest_s = self._first_timeout_s if first_timeout_s is None else first_timeout_s
        self._watched[address] = _Watched(longest_s)

    def forget(self, address: bytes) -> None:
        """Stop watching a service."""
        self._watched.pop(address, None)

    def on_message(self, address: bytes, *, is_result: bool, busy_s: float = 0.0) -> None:
        """Record a message: the result of work, or only a heartbeat."""
        watched = self._watched.get(address)
        if watched is not None:
            watched.slowest_s = max(watched.slowest_s, watched.silent_s)
            watched.silent_s = 0.0
            watched.announced_s = busy_s
            watched.has_worked = watched.has_worked or is_result

    def silent_s(self, address: bytes) -> float:
        """Return the seconds since the service's last message."""
        watched = self._watched.get(address)
        return watched.silent_s if watched is not None else 0.0

    def limit_s(self, address: bytes) -> float:
        """Return how long the service may be silent."""
        watched = self._watched[address]
        if not watched.has_worked:
            return max(watched.first_timeout_s, watched.announced_s)
        learned_s = min(self._first_timeout_s, _SLOWER * watched.slowest_s)
        return max(self._hang_timeout_s, learned_s, watched.announced_s)

    def describe_limit(self, address: bytes) -> str:
        """Return how long the service may be silent, with the setting that changes it."""
        has_worked = self._watched[address].has_worked
        name = "hang_timeout_s" if has_worked else "start_timeout_s, for the first work"
        return f"the limit is {self.limit_s(address):.0f} s: {name}"

    def update(self, now: float) -> list[bytes]:
        """Advance the time; return the services that have been silent for too long."""
        step = (
            0.0 if self._updated_at is None else min(now - self._updated_at, self._longest_step_s)
        )
        self._updated_at = now
        for watched in self._watched.values():
            watched.silent_s += step
        return [a for a, watched in self._watched.items() if watched.silent_s > self.limit_s(a)]
