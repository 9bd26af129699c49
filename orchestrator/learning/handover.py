"""Whether it pays that the verifier begins prepared rounds by itself."""

from orchestrator.learning.averages import Ema
from orchestrator.learning.round_observation import RoundObservation

_SAMPLES = 4
"""Rounds of each kind before they are compared."""
_LEAST_GAIN = 0.02
"""Share of a round that must be saved: what later drafts cost is known no better than that, and
handing over takes time of a processor that may be computing a model."""
_EVERY = 64
"""One round of so many is begun in the other way, so that both are known."""


class HandoverEstimates:
    """How long the target idles after a hit, asked or unasked, and what later drafts cost."""

    def __init__(self) -> None:
        self._asked_ms, self._unasked_ms = Ema(), Ema()
        self._asked = self._unasked = 0
        self._delay_ms = Ema()
        self._hits = Ema()
        """Share of speculative rounds that begin with a prepared draft."""
        self._round_ms = Ema()
        self._rounds = 0

    def observe(self, seen: RoundObservation) -> None:
        """Take in a round; in a shared pass others decide when it begins."""
        if seen.mode != "ssd" or not seen.speculating or seen.sequences > 1:
            return
        if seen.idle_ms is None:
            return
        self._rounds += 1
        self._hits.observe(float(seen.origin == "hit"))
        self._round_ms.observe(seen.idle_ms + seen.verify_ms)
        if seen.origin != "hit":
            return
        # Whoever is held up for long says nothing about messages.
        idle_ms = min(seen.idle_ms, seen.verify_ms)
        if seen.begun_unasked:
            self._unasked += 1
            self._unasked_ms.observe(idle_ms)
        else:
            self._asked += 1
            self._asked_ms.observe(idle_ms)

    def observe_delay(self, cost_ms: float) -> None:
        """What it would cost this round that drafts come later than if the verifier is asked."""
        self._delay_ms.observe(cost_ms)

    @property
    def hit_rate(self) -> float:
        """Share of speculative rounds that began with a prepared draft; 0 if there were none."""
        return self._hits.value

    @property
    def asked_ms(self) -> float:
        """How long the target idles after a hit until it is asked for the next round."""
        return self._asked_ms.value

    @property
    def saved_ms(self) -> float:
        """How much less it idles unasked; 0 if that is not known."""
        if min(self._asked, self._unasked) < _SAMPLES:
            return 0.0
        return max(0.0, self._asked_ms.value - self._unasked_ms.value)

    @property
    def gain(self) -> float:
        """Share of a round that is saved, negative if it is lost; 0 if it is not known."""
        if not self._round_ms.value:
            return 0.0
        saved_ms = self._hits.value * self.saved_ms
        return (saved_ms - self._delay_ms.value) / self._round_ms.value

    @property
    def pays(self) -> bool:
        """Whether to let the next round begin by itself, if only to see what that brings."""
        if self._asked < _SAMPLES:
            return False
        if self._unasked < _SAMPLES:
            return True
        return (self.gain >= _LEAST_GAIN) != (self._rounds % _EVERY == 0)
