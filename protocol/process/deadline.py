"""A point in time after which a wait has failed."""

from protocol.process.awake_clock import awake_time


class Deadline:
    """A number of seconds from now, during which this process is awake."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = awake_time() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - awake_time())

    @property
    def passed(self) -> bool:
        """True if no time is left."""
        return self.remaining == 0.0
