"""Finds the request that keeps killing a service. Pure.

All requests that a service worked for when it died are suspects. Its successor gets them one at a
time, together only with cleared ones: a suspect is cleared when it has progressed well beyond the
place of the death. New requests wait for that. A request that was present at too many deaths
without progress is guilty; an innocent one is convicted only by coincidence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SAME_PLACE = 16
"""Two deaths within this many tokens, more than a chain, count as the same place; a suspect is
cleared once it is further.
"""


@dataclass
class _Suspect:
    deaths: int = 0
    length: int = 0
    """Number of its tokens at the last death."""


class Probation:
    """The suspects at one service; requests are identified by their sequence's number."""

    def __init__(self, max_deaths: int) -> None:
        self._max_deaths = max_deaths
        self._suspects: dict[int, _Suspect] = {}

    def on_death(self, in_flight: Mapping[int, int], named: int = 0) -> list[int]:
        """Record a death of the service; return the requests that are guilty.

        Args:
            in_flight: requests that the service worked for, with the number of their tokens.
            named: the sequence that the service itself named last, which is retried first.
        """
        order = sorted(in_flight, key=lambda number: number != named)
        for number in order:
            suspect = self._suspects.pop(number, _Suspect())
            self._suspects[number] = _Suspect(suspect.deaths + 1, in_flight[number])
        guilty = [n for n, suspect in self._suspects.items() if suspect.deaths >= self._max_deaths]
        for number in guilty:
            del self._suspects[number]
        return guilty

    def select(self, candidates: Iterable[int], at_work: Iterable[int]) -> list[int]:
        """Return the candidates that the service may work for now, in addition to `at_work`."""
        waiting = list(candidates)
        if not self._suspects:
            return waiting
        if any(number in self._suspects for number in at_work):
            return []
        first = next((number for number in self._suspects if number in waiting), None)
        return waiting if first is None else [first]

    def on_progress(self, number: int, length: int) -> bool:
        """Record a request's number of tokens; return True if that clears it."""
        suspect = self._suspects.get(number)
        if suspect is None or length < suspect.length + SAME_PLACE:
            return False
        del self._suspects[number]
        return True

    def remove(self, number: int) -> None:
        """Forget a request that has ended."""
        self._suspects.pop(number, None)
