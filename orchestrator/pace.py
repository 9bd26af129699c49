"""Whether speculation pays: the measured speed of both ways to decode, and when to try which.

Speculation is on trial at the start and after each pause. Between, plain decoding is
measured for a few rounds, since verifications run faster while no drafter works beside
them. Where speculation is slower, decoding is plain, with ever rarer trials.
"""

from dataclasses import dataclass, field

_TRIAL = 24
"""Rounds of speculation before it is judged."""
_BASELINE = 4
"""Plain rounds that measure plain decoding."""
_SETTLING = 2
"""Rounds after a change that say nothing: the drafter ends its step, or has no tree yet."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 32, 512
_STALE = 512
"""Rounds after which a close race needs a new baseline."""
_CLOSE = 1.15
_FADE = 0.98


@dataclass
class _Speed:
    tokens: float = 0.0
    milliseconds: float = 0.0

    def observe(self, tokens: int, milliseconds: float) -> None:
        self.tokens = _FADE * self.tokens + tokens
        self.milliseconds = _FADE * self.milliseconds + milliseconds

    @property
    def per_second(self) -> float:
        return 1e3 * self.tokens / self.milliseconds if self.milliseconds > 0.0 else 0.0


@dataclass
class Pace:
    """Decides round by round; fed with what each round brought."""

    speculating: bool = True
    """Whether the next round is to be speculative."""
    _speculative: _Speed = field(default_factory=_Speed)
    _plain: _Speed = field(default_factory=_Speed)
    _left: int = _TRIAL + _SETTLING
    """Rounds until the next decision."""
    _settling: int = _SETTLING
    _pausing: bool = False
    """Whether plain decoding goes on because it is faster, not to be measured."""
    _pause: int = _SHORTEST_PAUSE
    _since_baseline: int = 0

    @property
    def speculative_tok_s(self) -> float:
        """Tokens per second of recent speculative rounds; 0 if there were none."""
        return self._speculative.per_second

    @property
    def plain_tok_s(self) -> float:
        """Tokens per second of recent plain rounds; 0 if there were none."""
        return self._plain.per_second

    def observe(self, tokens: int, milliseconds: float) -> None:
        """A round in the current way emitted `tokens` tokens in this time."""
        self._since_baseline += 1
        self._left -= 1
        if self._settling:
            self._settling -= 1
        else:
            (self._speculative if self.speculating else self._plain).observe(tokens, milliseconds)
        if self._left == 0:
            self._decide()

    def _decide(self) -> None:
        slower = self.speculative_tok_s < self.plain_tok_s
        if not self.speculating:
            self._since_baseline = 0
        if self._pausing:
            # Text changes: a new trial counts, not how the last one went.
            self._speculative = _Speed()
            self._go_on(speculating=True, rounds=_TRIAL)
        elif slower:
            self._go_on(speculating=False, rounds=self._pause)
            self._pausing = True
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self.speculating and self._needs_baseline():
            self._go_on(speculating=False, rounds=_BASELINE)
        else:
            self._pause = _SHORTEST_PAUSE
            self._go_on(speculating=True, rounds=_TRIAL)

    def _needs_baseline(self) -> bool:
        close = self.speculative_tok_s < _CLOSE * self.plain_tok_s
        return self.plain_tok_s == 0.0 or (close and self._since_baseline > _STALE)

    def _go_on(self, *, speculating: bool, rounds: int) -> None:
        self._settling = _SETTLING if speculating != self.speculating else 0
        self._left = rounds + self._settling
        self.speculating = speculating
        self._pausing = False
