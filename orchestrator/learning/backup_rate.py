"""How often the tokens of backups are accepted that were drafted while the target waited."""

from orchestrator.learning.snapshot import Shares

_ALIKE, _FADE = 6.0, 0.99
"""Samples that a rate assumed counts for among those seen, and how fast those fade, per round."""
_RECALLED = 12.0
"""Most samples that a remembered rate counts for."""


class BackupRate:
    """Fed with every round; what is not tried is forgotten too."""

    def __init__(self) -> None:
        self._offered = self._accepted = 0.0

    def given(self, assumed: float) -> float:
        """The rate, where this one is assumed until more is known."""
        return (self._accepted + _ALIKE * assumed) / (self._offered + _ALIKE)

    def fade(self) -> None:
        """Another round: an unlucky trial does not decide for ever."""
        self._offered *= _FADE
        self._accepted *= _FADE

    def observe(self, offered: int, accepted: int) -> None:
        """A backup of so many tokens, the first so many of which were accepted."""
        self._offered += min(accepted + 1, offered)
        self._accepted += accepted

    def memory(self) -> Shares | None:
        """For another run; None if there is nothing to remember."""
        if self._offered <= 0.0:
            return None
        return Shares(found=[self._accepted], tried=[self._offered])

    def recall(self, remembered: Shares) -> None:
        """Begin with what was known."""
        if remembered.fits(1):
            [self._accepted], [self._offered] = remembered.weighing(_RECALLED)
