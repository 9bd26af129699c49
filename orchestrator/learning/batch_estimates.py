"""Several requests in one batch: what their shared passes cost and bring.

A pass verifies the chains of all requests that wait. Its time is that of all of them, a
further draft token costs only what it adds to the pass, and whether speculation pays is
measured for each size of the batch separately. Pure.
"""

from collections.abc import Callable
from math import sqrt
from typing import Generic, Protocol, TypeVar

from orchestrator.learning.averages import DiscountedRatio, smooth
from orchestrator.learning.speculation_switch import SpeculationSwitch
from protocol.messages import Mode, Origin

_TRIAL = 6
"""Passes of speculation before plain decoding is measured: each of them has many rounds."""

_MOST_MISSED = 2.5
"""Passes of others that can be missed: what takes longer was a prompt's."""
_ASSUMED, _FADE, _FORGET = 4.0, 0.97, 0.999
"""Passes in which nothing was missed that are assumed, and what is kept of what was seen: by each
further pass, and by each in which nobody can miss anything."""
_ASSUMED_LOOKUPS, _STALL = 2.0, 2.5
"""Passes with a lookup that are assumed to take no longer than others; and that one counts for no
more than so many of these: what takes longer compiled something."""


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

    @property
    def origin(self) -> Origin:
        """Where its chain came from."""
        ...

    @property
    def speculating(self) -> bool:
        """Whether a drafter worked for it, or beside it."""
        ...

    @property
    def late_ms(self) -> float | None:
        """How long it was not taken along by passes; None where it cannot be late."""
        ...


P = TypeVar("P", bound=PassStats)


class BatchEstimates:
    """The requests that are decoded at the same time."""

    def __init__(self) -> None:
        self.streams = 1
        """How many there are now."""
        self._other_tokens = 0.0
        self._missed, self._longer = DiscountedRatio(), DiscountedRatio()
        self._switches: dict[str, SpeculationSwitch] = {}
        """By mode and size class, as `ssd 3`."""

    @property
    def scale(self) -> float:
        """The unit for the tokens of a pass, so that they scatter as one request's do."""
        return sqrt(self.streams)

    @property
    def other_tokens(self) -> int:
        """Tokens of other requests that a pass usually has; 0 for a request that is alone."""
        return round(self._other_tokens) if self.streams > 1 else 0

    def observe(self, part: PassStats, free_ms: float) -> None:
        """One request's part in a pass.

        Args:
            part: of the request.
            free_ms: what a pass takes in which all requests run free.
        """
        if self.streams > 1:
            self._other_tokens = smooth(self._other_tokens, part.rows - part.tokens)
            self._observe_lateness(part)
            if part.origin == "lookup" and not part.speculating and part.sequences > 1:
                passes = min(part.verify_ms / free_ms, _STALL)
                self._longer.observe(max(0.0, passes - 1.0), fade=_FADE)

    def _observe_lateness(self, part: PassStats) -> None:
        if part.late_ms is None:
            # Who runs free learns nothing of what it costs not to.
            self._missed, self._longer = self._missed.scale(_FORGET), self._longer.scale(_FORGET)
        elif part.verify_ms and (missed := part.late_ms / part.verify_ms) <= _MOST_MISSED:
            self._missed.observe(missed, fade=_FADE)

    @property
    def longer(self) -> float:
        """How much longer a pass with a lookup takes than one in which all requests run free.

        As a share of that one. It has more rows, and on a GPU it begins only when it is asked for.
        """
        return self._longer.with_prior(0.0, _ASSUMED_LOOKUPS)

    @property
    def missed_passes(self) -> float:
        """Of others, between the outcome of a request and the next pass that it asks for."""
        return self._missed.with_prior(0.0, _ASSUMED)

    def switch(
        self,
        mode: Mode,
        alone: dict[Mode, SpeculationSwitch],
        can_pay: Callable[[Mode], bool],
    ) -> SpeculationSwitch | None:
        """Whether speculation pays in a batch of this size; None for plain decoding.

        A size that is met first begins with a trial; with a pause, if the next smaller one that
        is known pauses: there speculation gains more.

        Args:
            mode: of the request.
            alone: for requests that have no company.
            can_pay: whether a trial could succeed at this size, as far as costs are known.
        """
        if self.streams == 1 or mode == "ar":
            return alone.get(mode)
        # Sizes 2, 3-4, 5-8, ... are alike enough.
        size = (self.streams - 1).bit_length()
        found = self._switches.get(f"{mode} {size}")
        if found is None:
            found = self._switches[f"{mode} {size}"] = SpeculationSwitch.for_batch(_TRIAL)
            known = (self._switches.get(f"{mode} {less}") for less in range(size - 1, 0, -1))
            smaller = next((one for one in known if one is not None), alone.get(mode))
            if (smaller is not None and smaller.is_paused) or not can_pay(mode):
                found.begin_with_pause()
        return found


class Passes(Generic[P]):
    """Puts the parts of each pass together, as the outcomes of its requests arrive."""

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
    """Parts of one pass carry the same time."""
    return part.verify_ms, part.sequences, part.rows
