"""Whether speculation pays: the measured speed of both ways to decode, and when to try which.

Speculation goes on until it has lost a few tokens' time against plain decoding, counted from
its best moment (Page's cumulative sum test): a gain survives unlucky stretches of text, and a
loss is ended after a bounded cost. Until it has gained anything it may lose only what bad luck
explains, which is little where little is accepted. Plain decoding is measured in rounds of its
own: first after a few rounds if few drafts are accepted, and again before an old measurement
ends speculation. Trials that
fail become rarer; a new text gets one early.
"""

from dataclasses import dataclass, field

from orchestrator.learning.averages import DiscountedRatio

_ROUNDS = 3
"""Rounds that measure plain decoding, and rounds of speculation before that where it looks poor."""
_POOR, _LATER = 0.7, 24
"""Accepted tokens a round below which plain decoding is likely to be faster, so that measuring it
costs nothing; and the rounds before it is measured where more are accepted."""
_SETTLING = 1
"""Rounds after a change that are not counted: the drafter ends its step, or has no draft yet."""
_MOST_LOSS = 6.0
"""Tokens of plain decoding that speculation may lose before it pauses. Acceptance scatters by
about one token a round: with two, half of all good trials ended by bad luck."""
_LUCK = 2.5
"""What it may lose before it has gained anything, in tokens per variance of a round's tokens: a
sequential test of a gain against a loss of equal size ends there (Wald). Accepted tokens scatter
like a Poisson variable, whose variance is its mean."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 48, 512
"""Plain rounds until the next trial; twice as many after each one that failed."""
_FRESH = 64
"""Rounds for which a measurement of plain decoding is recent enough to end speculation by."""
_FADE = 0.98
"""What a round leaves of the weight of earlier ones."""


@dataclass
class SpeculationSwitch:
    """Decides round by round; fed with what each round brought. Speeds are tokens over ms."""

    speculating: bool = True
    """Whether the next round is to be speculative."""
    is_paused: bool = False
    """Whether plain decoding goes on because it is faster, not to be measured."""
    is_trial_due: bool = False
    """Whether a pause is over, and no round of the trial after it has ended."""
    measured_at: float | None = None
    """When plain decoding was measured last, in seconds of a monotonic clock."""
    _speculative: DiscountedRatio = field(default_factory=DiscountedRatio)
    _plain: DiscountedRatio = field(default_factory=DiscountedRatio)
    _since_best: DiscountedRatio = field(default_factory=DiscountedRatio)
    """What speculation brought since it was last ahead of plain decoding."""
    _gained: float = 0.0
    """By how much it was ahead then, in tokens, since the trial began."""
    _accepted: DiscountedRatio = field(default_factory=DiscountedRatio)
    """Accepted draft tokens over rounds, of this trial."""
    _left: int = 0
    """Rounds until plain decoding ends."""
    _settling: int = _SETTLING
    _pause: int = _SHORTEST_PAUSE
    _since_plain: int = 0
    """Rounds since plain decoding was measured."""

    @property
    def speculative_tok_s(self) -> float:
        """Tokens per second of recent speculative rounds; 0 if there were none."""
        return 1e3 * self._speculative.value

    @property
    def plain_tok_s(self) -> float:
        """Tokens per second of recent plain rounds; 0 if there were none."""
        return 1e3 * self._plain.value

    @property
    def loss(self) -> float:
        """What speculation has lost since its best moment, in tokens of plain decoding."""
        return self._since_best.whole * self._plain.value - self._since_best.part

    @property
    def allowance(self) -> float:
        """What it may lose before it pauses, likewise."""
        luck = 1.0 + _LUCK * self._accepted.value
        return min(_MOST_LOSS, luck + self._gained)

    def observe(
        self, tokens: float, milliseconds: float, accepted: int, *, now: float = 0.0
    ) -> None:
        """Take in a round in the current way.

        Args:
            tokens: that it emitted.
            milliseconds: of its pass, and of the wait before it.
            accepted: tokens of the drafter that it accepted.
            now: when it ended, in seconds of a monotonic clock.
        """
        self._since_plain += 1
        self.is_trial_due = False
        if self._settling:
            self._settling -= 1
            return
        self._left -= 1
        if self.speculating:
            self._speculative.observe(tokens, milliseconds, fade=_FADE)
            self._since_best.observe(tokens, milliseconds)
            self._accepted.observe(accepted)
            self._judge()
            return
        self._plain.observe(tokens, milliseconds, fade=_FADE)
        self._since_plain, self.measured_at = 0, now
        if self._left <= 0:
            self._end_plain()

    def on_new_text(self) -> None:
        """Try again soon: how drafts fare on another text is not known from the last one's."""
        self._since_plain = max(self._since_plain, _FRESH)
        if self.is_paused:
            self._left = min(self._left, self._pause // 8)

    def _judge(self) -> None:
        """Measure plain decoding, pause, or go on."""
        if not self._plain.whole:
            rounds = self._accepted.whole
            if rounds >= (_ROUNDS if self._accepted.value < _POOR else _LATER):
                self._measure_plain()
            return
        if self.loss <= 0.0:
            self._gained -= self.loss
            self._since_best = DiscountedRatio()
            if self._gained > _MOST_LOSS:
                self._pause = _SHORTEST_PAUSE
        if self.loss > self.allowance:
            if self._since_plain > _FRESH:
                self._measure_plain()
            else:
                self._start_pause()
        elif self._since_plain > _LONGEST_PAUSE:
            self._measure_plain()

    def _measure_plain(self) -> None:
        self._plain = self._plain.scale(1.0 - _FADE)  # the machine may have changed
        self._change(speculating=False, rounds=_ROUNDS)

    def _end_plain(self) -> None:
        """Leave a measurement or a pause."""
        if self.is_paused:
            # Text changes: a new trial counts, not how the last one went.
            self._speculative = self._speculative.scale(1.0 - _FADE)
            self._since_best, self._accepted = DiscountedRatio(), DiscountedRatio()
            self._gained = 0.0
            self._change(speculating=True, rounds=0)
            self.is_trial_due = True
        elif self.loss > self.allowance:
            self._start_pause()
        else:
            self._change(speculating=True, rounds=0)

    def _start_pause(self) -> None:
        self._change(speculating=False, rounds=self._pause)
        self.is_paused = True
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _change(self, *, speculating: bool, rounds: int) -> None:
        self._settling = _SETTLING if speculating != self.speculating else 0
        self._left, self.speculating, self.is_paused = rounds, speculating, False
