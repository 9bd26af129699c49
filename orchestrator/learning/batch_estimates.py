"""Several requests at the target: what they share, and what their shared passes teach.

In a crowd a pass takes the chains of all requests that wait. Its time is the time of all of
them, a further draft token costs only what it adds to the pass, and whether speculation pays
is another question for each size of the crowd. Pure.
"""

from collections.abc import Mapping
from math import sqrt
from typing import Generic, Protocol, TypeVar

from orchestrator.learning.snapshot import Trial
from orchestrator.learning.speculation_switch import SpeculationSwitch
from protocol.messages import Mode

_SMOOTHING = 0.1
_PLACES = {f"{mode} {size}" for mode in ("sd", "ssd") for size in range(1, 17)}
_TRIAL = 6
"""Passes of speculation before plain decoding is measured: each of them has many rounds."""


class PassStats(Protocol):
    """What is known of one request's part in a pass."""

    @property
    def verify_ms(self) -> float:
        """Of the whole pass."""
        ...

    @property
    def sequences(self) -> int:
        """How many requests were part of it."""
        ...

    @property
    def rows(self) -> int:
        """Tokens of all of them."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of this one."""
        ...


P = TypeVar("P", bound=PassStats)


class BatchEstimates:
    """The requests that are decoded at the same time."""

    def __init__(self) -> None:
        self.streams = 1
        """How many there are now."""
        self._company = 0.0
        self._paces: dict[str, SpeculationSwitch] = {}
        """By mode and size, as they are remembered."""

    @property
    def scale(self) -> float:
        """The tokens of a pass are judged in units of this: they then scatter as one request's."""
        return sqrt(self.streams)

    @property
    def company(self) -> int:
        """Tokens of others that a pass usually has; 0 for who is alone."""
        return round(self._company) if self.streams > 1 else 0

    def meet(self, part: PassStats) -> None:
        """One request's part in a pass."""
        if self.streams > 1:
            self._company += _SMOOTHING * (part.rows - part.tokens - self._company)

    def pace(self, mode: Mode, alone: dict[Mode, SpeculationSwitch]) -> SpeculationSwitch | None:
        """Whether speculation pays in a crowd of this size; None for plain decoding."""
        if self.streams == 1 or mode == "ar":
            return alone.get(mode)
        # Sizes 2, 3-4, 5-8, ... are alike enough.
        size = (self.streams - 1).bit_length()
        return self._paces.setdefault(f"{mode} {size}", SpeculationSwitch(_left=_TRIAL))

    def memory(self) -> dict[str, Trial]:
        """How each mode has fared in crowds of each size, for another run."""
        return {place: pace.memory() for place, pace in self._paces.items()}

    def recall(self, remembered: Mapping[str, Trial]) -> None:
        """Forget how crowds fared, then begin with what was known."""
        self._paces = {}
        for place in _PLACES & remembered.keys():
            self._paces[place] = SpeculationSwitch(_left=_TRIAL)
            self._paces[place].recall(remembered[place])


class Passes(Generic[P]):
    """Puts the parts of each pass together."""

    def __init__(self) -> None:
        self._parts: list[P] = []

    def complete(self, part: P) -> list[P]:
        """All parts of the pass if this was the last one; a pass with a part missing is dropped."""
        if self._parts and _key(self._parts[0]) != _key(part):
            self._parts = []
        self._parts.append(part)
        if len(self._parts) < part.sequences:
            return []
        parts, self._parts = self._parts, []
        return parts


def _key(part: PassStats) -> tuple[float, int, int]:
    """Parts of one pass were told the same time."""
    return part.verify_ms, part.sequences, part.rows
