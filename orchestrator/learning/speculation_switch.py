"""The speculation switch: speculation runs on credit, in tokens of plain decoding.

Plain decoding is measured first. A text starts with a token of credit, or with what a few rounds
without an accepted draft cost; with more if the pair gains, by the gain that its schedule expects;
with half a token while it has lost more than it gained, and with what is left once it has lost on
several texts. Speculative rounds add their gain over plain decoding, or take their loss, and the
planner risks no more than is left; a single round may lose more, and is forgiven the rest. Without
credit the target decodes plainly, which earns the next trial. So an answer loses little more than
it started with.
"""

from dataclasses import dataclass, field
from math import inf

from orchestrator.learning.averages import FADE, DiscountedRatio

_START, _MOST = 1.0, 6.0
"""Credit of a new text, and the most that gains add up to: acceptance varies by about one token
per round, so a gain survives unlucky stretches of text.
"""
_TRUST = 3.0
"""Credit of a new text of a pair that gains, per expected gain of 1: it survives a bad start."""
_TRIED = 3.0
"""Rounds with one wrong draft token that a new text can at least pay for."""
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
    _rate_now: float = 0.0
    """Tokens per ms of plain rounds at the present pace; 0 if unknown."""
    _speculative: DiscountedRatio = field(default_factory=DiscountedRatio)
    _plain: DiscountedRatio = field(default_factory=DiscountedRatio)
    _start: float = _START
    """Credit of a new text of a pair that has not lost."""
    _lead: float = 0.0
    """Tokens that speculation gained on all texts, within limits."""
    _least_lead: float = -_MOST / 3
    """Least lead that the losses of this text can lead to: one text alone does not decide."""
    _left: int = _ROUNDS
    """Rounds that are left to measure plain decoding; below 0, speculative rounds since then."""

    @property
    def speculative_tok_s(self) -> float:
        """Tokens per second of recent speculative rounds; 0 if there were none."""
        return 1e3 * self._speculative.value

    @property
    def plain_tok_s(self) -> float:
        """Tokens per second of plain decoding; 0 before it was measured."""
        return 1e3 * self._plain_rate

    @property
    def risk_ms(self) -> float:
        """Time that a draft may cost if it is wrong; the next round starts before that is known."""
        return self.credit / 2 / self._plain_rate if self._plain.whole else 0.0

    @property
    def _plain_rate(self) -> float:
        """Tokens per ms of plain decoding: at the present pace, or as measured before."""
        return (self._rate_now or self._plain.value) if self._plain.whole else 0.0

    @property
    def _has_lost(self) -> bool:
        """True if the pair lost on several texts, and gained nothing since."""
        return self._lead <= -_MOST

    def on_new_text(self, *, may_gain: bool, gain: float = 1.0) -> None:
        """Start with a new text's credit, by the `gain` that is expected of this pair; with none
        unless good drafts may gain on this machine.
        """
        self._least_lead = max(-_MOST, self._lead - _MOST / 3)
        start = self._start if self._lead >= 0.0 else _START / 2
        if self._has_lost:
            start = min(self.credit, _START)
        elif self._lead > 0.0:
            start = max(start, min(_TRUST * (gain - 1.0), _MOST))
        self.credit = start if may_gain else min(self.credit, 0.0)
        self._decide(0.0)

    def observe(
        self,
        tokens: float,
        milliseconds: float,
        least_loss_ms: float,
        *,
        speculating: bool,
        plain_ms: float = inf,
        now: float = 0.0,
    ) -> None:
        """Add a round.

        Args:
            tokens: emitted tokens.
            milliseconds: time of its pass, and of the wait before it.
            least_loss_ms: extra time of a speculative round with one wrong draft token.
            speculating: True if it was speculative.
            plain_ms: usual time of a plain round now.
            now: end of the round, in seconds of a monotonic clock.
        """
        self._rate_now = 1.0 / plain_ms
        least_loss = least_loss_ms * self._plain_rate
        self._start = min(max(_START, _TRIED * least_loss), _MOST)
        if speculating:
            self._speculative.observe(tokens, milliseconds, fade=FADE)
            if self._plain.whole:
                gain = tokens - milliseconds * self._plain_rate
                self.credit = max(0.0, min(self.credit + gain, _MOST))
                self._lead = max(self._least_lead, min(self._lead + gain, _MOST))
            self._left -= 1
            if self._left <= -_APART:
                self._plain = DiscountedRatio()  # the machine may have changed
                self._left = _ROUNDS
        else:
            awaits_trial = self._left > 0 and self.credit >= _START / 2  # its cost is known now
            earned = self._start if awaits_trial else self.credit + _EARNED * tokens
            self.credit = max(self.credit, min(earned, self._start))
            self._plain.observe(tokens, milliseconds, fade=FADE)
            self._left, self.measured_at = max(0, self._left - 1), now
        self._decide(least_loss)

    def _decide(self, least_loss: float) -> None:
        """Speculate while there is credit; after a pause, once there is enough for a trial."""
        trial = _START if self._has_lost else _START / 2
        enough = least_loss if self.speculating else max(trial, least_loss)
        self.speculating = self._left <= 0 and self.credit >= enough
