"""Latency as a function of a count, T_v(m) or T_d(B), in the notation of users."""

from bisect import bisect_right
from collections.abc import Mapping
from math import isfinite

from protocol.errors import UsageError


class LatencyCurve:
    """Milliseconds for a count: linear between the points and beyond the last one.

    A single point is a constant: the time does not depend on the count.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        if (
            not points
            or min(points) < 1
            or not all(ms > 0 and isfinite(ms) for ms in points.values())
        ):
            raise UsageError("a curve of times needs counts from 1 on and times above 0 ms")
        self._counts = sorted(points)
        self._times = [points[count] for count in self._counts]

    def of(self, count: int) -> float:
        """Return the time for a count; at least the shortest time of any point."""
        counts, times = self._counts, self._times
        if len(counts) == 1 or count <= counts[0]:
            return times[0]
        right = min(bisect_right(counts, count), len(counts) - 1)
        left = right - 1
        slope = (times[right] - times[left]) / (counts[right] - counts[left])
        return max(min(times), times[left] + slope * (count - counts[left]))


def curve(text: float | str) -> LatencyCurve:
    """Parse `49` (the same for every count) or `1:49,2:54,4:62` (count:milliseconds).

    Raises:
        UsageError: the text has neither form.
    """
    try:
        if isinstance(text, str) and ":" in text:
            pairs = [point.split(":") for point in text.split(",")]
            points = {int(count): float(milliseconds) for count, milliseconds in pairs}
        else:
            points = {1: float(text)}
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not a time in milliseconds; write 49, or 1:49,2:54,4:62 (count:ms)"
        ) from error
    return LatencyCurve(points)
