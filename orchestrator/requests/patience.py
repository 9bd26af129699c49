"""How long the target waits for a draft: while it is likely to come, and not much longer.

The wait begins anew with each depth that arrives. A drafter that has failed to deliver is
given hardly any time until it says something again. Pure.
"""

_LEAST_S = 0.5
_TIMES = 10.0
"""The longest wait, as a multiple of the usual time per depth."""

_SUSPECT_S = 0.02


class DraftTimeout:
    """Of one orchestrator with its drafter."""

    def __init__(self, at_most_s: float) -> None:
        self._at_most_s = at_most_s
        self._suspect = False

    def wait_s(self, usual_ms: float) -> float:
        """Longest wait for the next depth, which usually takes this long."""
        if self._suspect:
            return min(self._at_most_s, _SUSPECT_S)
        return min(self._at_most_s, max(_LEAST_S, _TIMES * usual_ms / 1e3))

    def late(self) -> None:
        """It did not come in time."""
        self._suspect = True

    def came(self) -> None:
        """The drafter delivered something."""
        self._suspect = False
