"""Whether it pays that the verifier begins prepared rounds by itself."""

from orchestrator.learning.averages import Ema
from orchestrator.learning.round_observation import RoundObservation

_SAMPLES = 4
"""Rounds of each kind before they are compared."""
_LEAST_GAIN = 0.02
"""Share of a round that must be saved: handing over takes time of a processor."""
_EVERY = 64
"""One round of so many is begun in the other way, so that both are known."""


class HandoverEstimates:
    """How long the target idles after a hit, asked or unasked."""

    def __init__(self) -> None:
        self._idle_ms = {False: Ema(), True: Ema()}
        self._counts = {False: 0, True: 0}
        self._hits, self._round_ms = Ema(), Ema()
        self._rounds = 0
        self.lost_share = 0.0
        """Share of its tokens that a hit loses, since the drafter hears of outcomes later than the
        verifier."""

    def observe(self, seen: RoundObservation) -> None:
        """Take in a round; in a shared pass others decide when it begins."""
        if not seen.beside or not seen.speculating or seen.sequences > 1 or seen.idle_ms is None:
            return
        self._rounds += 1
        self._hits.observe(float(seen.origin == "hit"))
        self._round_ms.observe(seen.idle_ms + seen.verify_ms)
        if seen.origin == "hit":
            # A process that is held up for long says nothing about messages.
            self._counts[seen.begun_unasked] += 1
            self._idle_ms[seen.begun_unasked].observe(min(seen.idle_ms, seen.verify_ms))

    @property
    def saved_ms(self) -> float:
        """How much less the target idles unasked; 0 if that is not known."""
        if min(self._counts.values()) < _SAMPLES:
            return 0.0
        return max(0.0, self._idle_ms[False].value - self._idle_ms[True].value)

    @property
    def gain(self) -> float:
        """Share of a round that is saved, negative if it is lost; 0 if it is not known."""
        if not self._round_ms.value:
            return 0.0
        return self._hits.value * (self.saved_ms / self._round_ms.value - self.lost_share)

    @property
    def pays(self) -> bool:
        """Whether to let the next round begin by itself, if only to see what that brings."""
        if self._counts[False] < _SAMPLES:
            return False
        if self._counts[True] < _SAMPLES:
            return True
        return (self.gain >= _LEAST_GAIN) != (self._rounds % _EVERY == 0)
