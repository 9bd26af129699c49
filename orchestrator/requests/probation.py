"""Finds the request on whose account a service keeps dying. Pure.

All requests that a service was at work for when it died are suspects. Its successor gets
them one at a time, beside none but cleared ones: a suspect is cleared when it has gone on
well beyond where it was. New requests wait for that. A request that was there for too many
deaths without getting on is guilty; an innocent one is, only by coincidence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_CLEARED_BY = 16
"""Tokens beyond the place of the death after which a suspect is cleared: more than a chain."""


@dataclass
class _Suspect:
    deaths: int = 0
    length: int = 0
    """Of its tokens at the last death."""


class Probation:
    """Of the requests at one service; requests are named by their sequence's number."""

    def __init__(self, max_deaths: int) -> None:
        self._max_deaths = max_deaths
        self._suspects: dict[int, _Suspect] = {}

    def on_death(self, in_flight: Mapping[int, int], named: int = 0) -> list[int]:
        """The service died; returns the requests that are guilty.

        Args:
            in_flight: those that it was at work for, with the number of their tokens.
            named: the one that the service itself named last, which is tried first.
        """
        order = sorted(in_flight, key=lambda number: number != named)
        for number in order:
            suspect = self._suspects.pop(number, _Suspect())
            self._suspects[number] = _Suspect(suspect.deaths + 1, in_flight[number])
        guilty = [n for n, one in self._suspects.items() if one.deaths >= self._max_deaths]
        for number in guilty:
            del self._suspects[number]
        return guilty

    def select(self, candidates: Iterable[int], at_work: Iterable[int]) -> list[int]:
        """Which of the candidates the service may work for now, beside those it works for."""
        waiting = list(candidates)
        if not self._suspects:
            return waiting
        if any(number in self._suspects for number in at_work):
            return []
        first = next((number for number in self._suspects if number in waiting), None)
        return waiting if first is None else [first]

    def on_progress(self, number: int, length: int) -> bool:
        """A request has this many tokens now; True if that clears it."""
        suspect = self._suspects.get(number)
        if suspect is None or length < suspect.length + _CLEARED_BY:
            return False
        del self._suspects[number]
        return True

    def remove(self, number: int) -> None:
        """The request is over."""
        self._suspects.pop(number, None)
