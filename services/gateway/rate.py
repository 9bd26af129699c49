"""How many requests a client may make in a minute."""

from collections import OrderedDict

_MOST_CLIENTS = 10_000
"""Clients that are remembered; those that were silent longest are forgotten first."""


class RateLimit:
    """A bucket for each client: it holds a minute's requests and fills evenly.

    Args:
        per_minute: requests that a client may make; 0 is any number.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By client: requests left, and when that was."""

    def wait_s(self, client: str, now: float) -> float:
        """Take a request's place; or how many seconds from `now` there will be one."""
        if not self._per_minute:
            return 0.0
        rate = self._per_minute / 60.0
        left, since = self._buckets.pop(client, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + rate * (now - since))
        allowed = left >= 1.0
        self._buckets[client] = (left - 1.0 if allowed else left, now)
        if len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1.0 - left) / rate
