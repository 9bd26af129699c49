"""Whether speculation pays: the measured speed of both ways to decode, and when to try which.

Speculation goes on until it has lost a few tokens' time against plain decoding, counted from
its best moment (Page's cumulative sum test): a gain survives unlucky stretches of text, and
a loss is ended after a bounded cost. Until speculation has been ahead once, it may lose only
what bad luck explains, given how much its rounds scatter. Plain decoding is measured in a few
rounds of its own, since verifications run faster while no drafter works beside them: at once
where few drafts are accepted, later where many are, and again before an old measurement ends
speculation. The trial after a pause may lose less than the one before; trials that fail
become rarer, and a new text gets one early. A drafter of which nothing is accepted is
recognised sooner, without any clock (`futility_test`). A measured speed expires with time, and
when passes take longer or shorter than they did then (`freshness`).
"""

from dataclasses import dataclass, field

from orchestrator.learning.averages import DiscountedRatio
from orchestrator.learning.freshness import LONGEST_S, Freshness
from orchestrator.learning.futility_test import FutilityTest

_TRIAL = 24
"""Rounds of speculation before plain decoding is measured for the first time."""
_GLIMPSE, _POOR = 3, 0.7
"""The same where less than `_POOR` draft tokens a round were accepted: there plain decoding is
likely to be faster, and measuring it costs nothing."""
_BASELINE, _FIRST_BASELINE = 4, 2
"""Plain rounds that measure plain decoding; the first time they only have to tell a loss."""
_SETTLING, _FIRST_SETTLING = 2, 1
"""Rounds after a change that are not counted: the drafter ends its step, or has no tree yet."""
_TOLERANCE, _LEAST_TOLERANCE = 6.0, 3.0
"""What speculation may lose before it pauses, in tokens of plain decoding. Acceptance scatters
by about one token a round: with two, half of all good trials ended by bad luck."""
_LUCK, _LEAST_LUCK = 2.5, 0.7
"""What it may lose before it has gained anything: so many times the variance of a round's tokens.
A sequential test of a gain against a loss of equal size ends there, in a few per cent of the
cases wrongly (Wald); where nearly nothing is accepted, nothing scatters."""
_REAL_GAIN = 0.5
"""Tokens that speculation is not ahead by because of a noisy clock alone."""
_ASSUMED_ROUNDS, _ASSUMED_VARIANCE = 1.0, 0.5
"""What is assumed of that variance, and the rounds that this counts for."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 48, 512
_EARLIER = 32
"""How much sooner a new text gets a trial than the same one."""
_LOOKED_AT = 10
"""Tokens of a new text that are decoded plainly before: the drafter looks back on them first."""
_FRESH = 64
"""Rounds for which a baseline is recent enough to end speculation by it."""
_KEPT = 24
"""Rounds for which a baseline is kept although the machine has changed: one that changes all the
time is not measured all the time."""
_STALE = 512
"""Rounds after which a close race needs a new baseline."""
_CLOSE = 1.15
_FADE = 0.98
_OLD_BASELINE = 0.25
"""What an earlier baseline weighs beside a new one."""
_EXPIRED_BASELINE = 0.02
"""The same if the machine has changed: next to nothing."""


@dataclass
class _Scatter:
    """How much the tokens of single rounds differ."""

    _rounds: int = 0
    _mean: float = 0.0
    _squares: float = 0.0
    """Sum of squared deviations from the mean (Welford)."""

    def observe(self, tokens: float) -> None:
        self._rounds += 1
        off = tokens - self._mean
        self._mean += off / self._rounds
        self._squares += off * (tokens - self._mean)

    @property
    def variance(self) -> float:
        """In tokens squared."""
        assumed = _ASSUMED_ROUNDS * _ASSUMED_VARIANCE
        return (self._squares + assumed) / (self._rounds + _ASSUMED_ROUNDS)


@dataclass
class SpeculationSwitch:
    """Decides round by round; fed with what each round brought. Speeds are tokens over ms."""

    speculating: bool = True
    """Whether the next round is to be speculative."""
    _speculative: DiscountedRatio = field(default_factory=DiscountedRatio)
    _plain: DiscountedRatio = field(default_factory=DiscountedRatio)
    _since_best: DiscountedRatio = field(default_factory=DiscountedRatio)
    """What speculation brought since it was last ahead of plain decoding."""
    _gained: float = 0.0
    """By how much it was ahead then, in tokens, since the trial began."""
    _scatter: _Scatter = field(default_factory=_Scatter)
    _left: int = _TRIAL
    """Rounds until plain decoding is measured, or until the next trial."""
    _settling: int = _FIRST_SETTLING
    is_paused: bool = False
    """Whether plain decoding goes on because it is faster, not to be measured."""
    _pause: int = _SHORTEST_PAUSE
    _tolerance: float = _TOLERANCE
    _accepted: DiscountedRatio = field(default_factory=DiscountedRatio)
    """Draft tokens over chains, of all trials."""
    _futility: FutilityTest = field(default_factory=FutilityTest)
    _is_retrial: bool = False
    """Whether speculation goes on since a pause."""
    _since_change: int = 0
    _since_baseline: int = 0
    _speculated_at: float | None = None
    freshness: Freshness = field(default_factory=Freshness)
    """Of plain decoding's speed."""

    @classmethod
    def for_batch(cls, trial: int) -> "SpeculationSwitch":
        """One whose first trial has `trial` passes, each with the rounds of several requests."""
        return cls(_left=trial)

    @property
    def speculative_tok_s(self) -> float:
        """Tokens per second of recent speculative rounds; 0 if there were none."""
        return 1e3 * self._speculative.value

    @property
    def plain_tok_s(self) -> float:
        """Tokens per second of recent plain rounds; 0 if there were none."""
        return 1e3 * self._plain.value

    def report_speculative_tok_s(self, now: float) -> float:
        """Of speculative rounds, if there were any here and not long ago; else 0."""
        recent = self._speculated_at is not None and now - self._speculated_at <= LONGEST_S
        return self.speculative_tok_s if recent else 0.0

    def report_plain_tok_s(self, now: float) -> float:
        """Of plain rounds, if measured here and on the machine as it still is; else 0."""
        known = self.freshness.age_s(now) is not None and not self.freshness.is_expired(now)
        return self.plain_tok_s if known and self._since_baseline <= _STALE else 0.0

    @property
    def loss(self) -> float:
        """What speculation has lost since its best moment, in tokens of plain decoding."""
        return self._since_best.whole * self._plain.value - self._since_best.part

    @property
    def allowance(self) -> float:
        """What it may lose before it pauses, likewise."""
        luck = max(_LEAST_LUCK, _LUCK * self._scatter.variance)
        return min(self._tolerance, luck + self._gained)

    def observe(
        self,
        tokens: float,
        milliseconds: float,
        accepted: int,
        chains: int = 1,
        *,
        now: float = 0.0,
    ) -> None:
        """A pass in the current way emitted `tokens` tokens in this time.

        Args:
            tokens: in one unit throughout, see `BatchEstimates.scale`.
            milliseconds: of the pass, and of the wait before it.
            accepted: tokens of the drafter that it accepted.
            chains: requests in it whose chain came from the drafter, or could have.
            now: when it ended, in seconds of a monotonic clock.
        """
        self._since_baseline += 1
        self._since_change += 1
        if self._settling:
            self._settling -= 1
            return
        self._left -= 1
        if self.speculating:
            self._speculative.observe(tokens, milliseconds, fade=_FADE)
            self._speculated_at = now
            self._since_best.observe(tokens, milliseconds)
            self._futility.observe(accepted, chains)
            self._scatter.observe(tokens)
            self._accepted.observe(accepted, chains)
            self._judge_speculation(now)
        else:
            self._plain.observe(tokens, milliseconds, fade=_FADE)
            self._since_baseline = 0
            self.freshness.on_measured(now)
            if self._left <= 0:
                self._end_plain()

    def on_new_text(self) -> None:
        """Another request: how drafts fare on its text is not known from the last one's."""
        if self.is_paused:
            self._left = min(self._left, max(_LOOKED_AT, self._pause // _EARLIER))

    def call_off_trial(self) -> None:
        """The trial that is due cannot succeed: the pause goes on as long again."""
        if self.is_trial_due:
            self._change(speculating=False, rounds=self._pause)
            self.is_paused = True

    def begin_with_pause(self) -> None:
        """Nothing is known, but that speculation is not likely to pay: try it later."""
        self._change(speculating=False, rounds=_SHORTEST_PAUSE)
        self.is_paused = True

    def on_other_round(self) -> None:
        """A round or pass in the current way that says nothing of its speed: a pause goes on."""
        if self.is_paused:
            self._left -= 1
            if self._left <= 0:
                self._end_plain()

    @property
    def accepted_per_round(self) -> float | None:
        """Draft tokens that a round brings; None if there were only a few rounds."""
        return self._accepted.value if self._accepted.whole >= _GLIMPSE else None

    @property
    def is_trial_due(self) -> bool:
        """Whether a pause is over, and no round of the trial after it has ended."""
        return self.speculating and self._is_retrial and not self._since_change

    def _judge_speculation(self, now: float) -> None:
        """Another speculative round was counted."""
        known = self.plain_tok_s > 0.0
        if known and self.loss <= 0.0:
            self._gained -= self.loss
            if self.loss < -_REAL_GAIN:
                self._futility = self._futility.after_gain()
            self._since_best = DiscountedRatio()
            if self._since_change > _TRIAL:
                self._pause, self._tolerance = _SHORTEST_PAUSE, _TOLERANCE
        if self._futility.is_futile:
            self._start_pause()
            return
        if not known:
            if self._left <= 0 or self._looks_poor:
                self._measure_plain(_FIRST_BASELINE)
            return
        changed = self.freshness.has_changed and self._since_baseline > _KEPT
        if changed or self.freshness.is_old(now):
            self._forget_baseline()
            return
        old = _FRESH if self.loss > self.allowance else _STALE
        close = self.speculative_tok_s < _CLOSE * self.plain_tok_s
        if close and self._since_baseline > old:
            self._measure_plain(_BASELINE)
        elif self.loss > self.allowance:
            self._start_pause()

    @property
    def _looks_poor(self) -> bool:
        """Whether so little is accepted that plain decoding is likely to be faster."""
        return self._accepted.whole >= _GLIMPSE and self._accepted.value < _POOR

    def _end_plain(self) -> None:
        """A baseline or a pause is over."""
        self._since_baseline = 0
        if self.is_paused:
            # Text changes: a new trial counts, not how the last one went.
            self._speculative = self._speculative.scale(_EXPIRED_BASELINE)
            self._since_best = DiscountedRatio()
            self._gained, self._scatter = 0.0, _Scatter()
            self._change(speculating=True, rounds=_TRIAL)
            self._is_retrial = True
        elif self.loss > self.allowance:
            self._start_pause()
        else:
            self._change(speculating=True, rounds=_TRIAL)

    def _measure_plain(self, rounds: int) -> None:
        self._plain = self._plain.scale(_OLD_BASELINE)
        self._change(speculating=False, rounds=rounds)
        if rounds == _FIRST_BASELINE:
            self._settling = _FIRST_SETTLING

    def _forget_baseline(self) -> None:
        """It is measured anew, and what was lost against it is not counted."""
        self._speculative = self._speculative.scale(_OLD_BASELINE)
        self._since_best = DiscountedRatio()
        self._plain = self._plain.scale(_EXPIRED_BASELINE)
        self._change(speculating=False, rounds=_BASELINE)

    def _start_pause(self) -> None:
        self._change(speculating=False, rounds=self._pause)
        self.is_paused = True
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._tolerance = max(0.5 * self._tolerance, _LEAST_TOLERANCE)
        self._futility = self._futility.for_next_trial()

    def _change(self, *, speculating: bool, rounds: int) -> None:
        self._settling = _SETTLING if speculating != self.speculating else 0
        self._left = rounds
        self._since_change = 0
        self._is_retrial = False
        self.speculating = speculating
        self.is_paused = False
