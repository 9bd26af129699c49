"""The speculation switch: speculation runs on credit, in tokens of plain decoding.

Plain decoding is measured first. A text starts with a token of credit, or with what a few rounds
without an accepted draft cost, and with half a token while the pair has lost more than it gained;
after three texts in a row on which such a pair lost, only one of two, then of four, and so on.
Speculative rounds add their gain over plain decoding, or take their loss, and the planner risks no
more than is left; a single round may lose more, and is forgiven the rest. Without credit the target
decodes plainly, which earns the next trial. An answer loses little more than the credit that it
started with.
"""

from dataclasses import dataclass, field

from orchestrator.learning.averages import FADE, DiscountedRatio

_START, _MOST = 1.0, 6.0
"""Credit of a new text, and the most that gains add up to: acceptance varies by about one token
per round, so a gain survives unlucky stretches of text.
"""
_TRIED = 3.0
"""Rounds with one wrong draft token that a new text can at least pay for."""
_FEW_LOSSES, _MOST_LOSSES = 2, 6
"""Texts in a row that lose before others start without credit, and the most that count."""
_EARNED = 0.005
"""Credit that a token of plain decoding earns."""
_ROUNDS, _APART = 3, 512
"""Rounds that measure plain decoding, and speculative rounds between two measurements."""


@dataclass
class SpeculationSwitch:
    """Decides round by round from the results of each round. Speeds are tokens over ms."""

    credit: float = _START
    """Tokens of plain decoding that speculation may lose."""
    speculating: bool = False
    """True if the next round is to be speculative."""
    measured_at: float | None = None
    """Time of the last measurement of plain decoding, in seconds of a monotonic clock."""
    _speculative: DiscountedRatio = field(default_factory=DiscountedRatio)
    _plain: DiscountedRatio = field(default_factory=DiscountedRatio)
    _start: float = _START
    """Credit of a new text of a pair that has not lost."""
    _is_trusted: bool = False
    """True if this text started with all of it, and was decoded plainly so far."""
    _lead: float = 0.0
    """Tokens that speculation gained on all texts, within limits."""
    _gained: float | None = None
    """Tokens that speculation gained on this text; None if it was not tried."""
    _losses: int = 0
    """Tried texts in a row that lost."""
    _left_out: int = 0
    """Texts since the last of them, which start without credit."""
    _left: int = _ROUNDS
    """Rounds that are left to measure plain decoding; below 0, speculative rounds since then."""

    @property
    def speculative_tok_s(self) -> float:
        """Tokens per second of recent speculative rounds; 0 if there were none."""
        return 1e3 * self._speculative.value

    @property
    def plain_tok_s(self) -> float:
        """Tokens per second of recent plain rounds; 0 if there were none."""
        return 1e3 * self._plain.value

    @property
    def risk_ms(self) -> float:
        """Time that a draft may cost if it is wrong; the next round starts before that is known."""
        return self.credit / 2 / self._plain.value if self._plain.whole else 0.0

    def on_new_text(self, *, may_gain: bool) -> None:
        """Start with the credit of a new text; `may_gain`: this pair may gain on this machine."""
        self._is_trusted = may_gain and self._lead >= 0.0
        start = self._start if self._is_trusted else _START / 2
        self.credit = start if may_gain and self._count_text() else min(self.credit, 0.0)
        self._decide(0.0)

    def _count_text(self) -> bool:
        """Count a new text; return True if it is one of those that start with credit."""
        if self._gained is not None:
            self._losses = min(self._losses + 1, _MOST_LOSSES) if self._gained < 0.0 else 0
            self._left_out = 0
        self._gained, self._left_out = None, self._left_out + 1
        return self._left_out >= 2.0 ** (self._losses - _FEW_LOSSES)

    def observe(
        self,
        tokens: float,
        milliseconds: float,
        least_loss_ms: float,
        *,
        speculating: bool,
        now: float = 0.0,
    ) -> None:
        """Add a round.

        Args:
            tokens: emitted tokens.
            milliseconds: time of its pass, and of the wait before it.
            least_loss_ms: extra time of a speculative round with one wrong draft token.
            speculating: True if it was speculative.
            now: end of the round, in seconds of a monotonic clock.
        """
        least_loss = least_loss_ms * self._plain.value
        self._start = min(max(_START, _TRIED * least_loss), _MOST)
        if speculating:
            self._is_trusted, self._gained = False, self._gained or 0.0
            self._speculative.observe(tokens, milliseconds, fade=FADE)
            if self._plain.whole:
                gain = tokens - milliseconds * self._plain.value
                self.credit = max(0.0, min(self.credit + gain, _MOST))
                self._lead = max(-_MOST, min(self._lead + gain, _MOST))
                self._gained += gain
            self._left -= 1
            if self._left <= -_APART:
                self._plain = DiscountedRatio()  # the machine may have changed
                self._left = _ROUNDS
        else:
            earned = self._start if self._is_trusted else self.credit + _EARNED * tokens
            self.credit = max(self.credit, min(earned, self._start))
            self._plain.observe(tokens, milliseconds, fade=FADE)
            self._left, self.measured_at = max(0, self._left - 1), now
        self._decide(least_loss)

    def _decide(self, least_loss: float) -> None:
        """Speculate while there is credit; after a pause, once there is enough for a trial."""
        enough = least_loss if self.speculating else max(_START / 2, least_loss)
        self.speculating = self._left <= 0 and self.credit >= enough
