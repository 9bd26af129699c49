"""The speculation switch: compares both ways to decode, and decides when to try which.

Speculation continues until it has lost a few tokens' time against plain decoding, counted from its
best moment (Page's cumulative sum test): a gain survives unlucky stretches of text, and a loss ends
after a bounded cost. Before its first gain it may lose only as much as bad luck explains, which is
little if little is accepted. Plain decoding is measured in separate rounds: first after a few
rounds if few drafts are accepted, and again before an old measurement ends speculation. Failed
trials become rarer; a new text gets one early.
"""

from dataclasses import dataclass, field

from orchestrator.learning.averages import FADE, DiscountedRatio

_ROUNDS = 3
"""Rounds that measure plain decoding, and rounds of speculation before that if acceptance is
poor.
"""
_POOR, _LATER = 0.7, 24
"""Accepted tokens per round below which plain decoding is likely to be faster, so that measuring
it costs nothing; and the rounds before it is measured otherwise.
"""
_MOST_LOSS = 6.0
"""Tokens of plain decoding that speculation may lose before it pauses. Acceptance varies by
about one token per round: with two, bad luck ended half of all good trials.
"""
_LUCK = 2.5
"""Loss allowed before the first gain, in tokens per variance of a round's tokens: a sequential
test of a gain against a loss of equal size ends there (Wald). Accepted tokens vary like a
Poisson variable, whose variance is its mean.
"""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 48, 512
"""Plain rounds until the next trial; doubled after each failed one. A measurement of plain
decoding is recent enough to end speculation for the shortest of them.
"""


@dataclass
class SpeculationSwitch:
    """Decides round by round from the results of each round. Speeds are tokens over ms."""

    speculating: bool = True
    """True if the next round is to be speculative."""
    is_paused: bool = False
    """True while plain decoding continues because it is faster, not to be measured."""
    measured_at: float | None = None
    """Time of the last measurement of plain decoding, in seconds of a monotonic clock."""
    _speculative: DiscountedRatio = field(default_factory=DiscountedRatio)
    _plain: DiscountedRatio = field(default_factory=DiscountedRatio)
    _since_best: DiscountedRatio = field(default_factory=DiscountedRatio)
    """Tokens and time of speculation since it was last ahead of plain decoding."""
    _gained: float = 0.0
    """Its lead at that point, in tokens, since the trial started."""
    _accepted: DiscountedRatio = field(default_factory=DiscountedRatio)
    """Accepted draft tokens over rounds, in this trial."""
    _left: int = 0
    """Rounds until plain decoding ends."""
    _is_settling: bool = True
    """True in the first round after a change, which is not counted: the drafter ends its step, or
    has no draft yet.
    """
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
        """Loss of speculation since its best moment, in tokens of plain decoding."""
        return self._since_best.whole * self._plain.value - self._since_best.part

    @property
    def allowance(self) -> float:
        """Loss at which it pauses, in the same unit."""
        luck = 1.0 + _LUCK * self._accepted.value
        return min(_MOST_LOSS, luck + self._gained)

    def observe(
        self, tokens: float, milliseconds: float, accepted: int, *, now: float = 0.0
    ) -> None:
        """Add a round of the current way to decode.

        Args:
            tokens: emitted tokens.
            milliseconds: time of its pass, and of the wait before it.
            accepted: accepted draft tokens.
            now: end of the round, in seconds of a monotonic clock.
        """
        self._since_plain += 1
        if self._is_settling:
            self._is_settling = False
            return
        self._left -= 1
        if self.speculating:
            self._speculative.observe(tokens, milliseconds, fade=FADE)
            self._since_best.observe(tokens, milliseconds)
            self._accepted.observe(accepted)
            self._judge()
            return
        self._plain.observe(tokens, milliseconds, fade=FADE)
        self._since_plain, self.measured_at = 0, now
        if self._left <= 0:
            self._end_plain()

    def on_new_text(self) -> None:
        """Schedule an early trial: acceptance on a new text is unknown."""
        self._since_plain = max(self._since_plain, _SHORTEST_PAUSE)
        if self.is_paused:
            self._left = min(self._left, self._pause // 8)

    def _judge(self) -> None:
        """Measure plain decoding, pause, or continue."""
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
            if self._since_plain > _SHORTEST_PAUSE:
                self._measure_plain()
            else:
                self._start_pause()
        elif self._since_plain > _LONGEST_PAUSE:
            self._measure_plain()

    def _measure_plain(self) -> None:
        self._plain = self._plain.scale(1.0 - FADE)  # the machine may have changed
        self._change(speculating=False, rounds=_ROUNDS)

    def _end_plain(self) -> None:
        """End a measurement or a pause."""
        if self.is_paused:
            # Text changes: only the new trial counts, not the last one.
            self._speculative = self._speculative.scale(1.0 - FADE)
            self._since_best, self._accepted = DiscountedRatio(), DiscountedRatio()
            self._gained = 0.0
            self._change(speculating=True, rounds=0)
        elif self.loss > self.allowance:
            self._start_pause()
        else:
            self._change(speculating=True, rounds=0)

    def _start_pause(self) -> None:
        self._change(speculating=False, rounds=self._pause)
        self.is_paused = True
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _change(self, *, speculating: bool, rounds: int) -> None:
        self._is_settling = speculating != self.speculating
        self._left, self.speculating, self.is_paused = rounds, speculating, False
