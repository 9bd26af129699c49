"""Whether speculation pays: the measured speed of both ways to decode, and when to try which.

Speculation goes on until it has lost a few tokens' time against plain decoding, counted from
its best moment (Page's cumulative sum test): a gain survives unlucky stretches of text, and
a loss is ended after a bounded cost. Plain decoding is measured in a few rounds of its own,
since verifications run faster while no drafter works beside them, and again before an old
measurement ends speculation. After each pause follows a trial with less patience; trials
that fail become rarer, and a new text gets one early. A drafter of which nothing is accepted
is known sooner, without any clock (`doubt`).
"""

from dataclasses import dataclass, field

from orchestrator.learning.futility_test import FutilityTest
from orchestrator.learning.snapshot import Rate, Trial

_TRIAL = 24
"""Rounds of speculation before plain decoding is measured for the first time."""
_BASELINE = 4
"""Plain rounds that measure plain decoding."""
_SETTLING = 2
"""Rounds after a change that say nothing: the drafter ends its step, or has no tree yet."""
_PATIENCE, _LEAST_PATIENCE = 6.0, 3.0
"""What speculation may lose before it pauses, in tokens of plain decoding. Acceptance scatters
by about one token a round: with two, half of all good trials ended by bad luck."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 32, 512
_EARLIER = 16
"""How much sooner a new text gets a trial than the same one."""
_FRESH = 64
"""Rounds for which a baseline is recent enough to end speculation by it."""
_STALE = 512
"""Rounds after which a close race needs a new baseline."""
_CLOSE = 1.15
_FADE = 0.98
_OLD_BASELINE = 0.25
"""What an earlier baseline weighs beside a new one."""

_RECALLED = 8.0
"""Most tokens that a remembered speed counts for."""


@dataclass
class _Speed:
    tokens: float = 0.0
    milliseconds: float = 0.0

    def observe(self, tokens: float, milliseconds: float, fade: float = _FADE) -> None:
        self.tokens = fade * self.tokens + tokens
        self.milliseconds = fade * self.milliseconds + milliseconds

    @property
    def per_second(self) -> float:
        return 1e3 * self.tokens / self.milliseconds if self.milliseconds > 0.0 else 0.0

    def memory(self) -> Rate:
        return Rate(tokens=self.tokens, milliseconds=self.milliseconds)

    @staticmethod
    def recalled(rate: Rate) -> "_Speed":
        weight = min(1.0, _RECALLED / rate.tokens) if rate.tokens else 0.0
        return _Speed(rate.tokens, rate.milliseconds).faded(weight)

    def faded(self, weight: float) -> "_Speed":
        return _Speed(weight * self.tokens, weight * self.milliseconds)


@dataclass
class SpeculationSwitch:
    """Decides round by round; fed with what each round brought."""

    speculating: bool = True
    """Whether the next round is to be speculative."""
    _speculative: _Speed = field(default_factory=_Speed)
    _plain: _Speed = field(default_factory=_Speed)
    _since_best: _Speed = field(default_factory=_Speed)
    """What speculation brought since it was last ahead of plain decoding."""
    _left: int = _TRIAL
    """Rounds until plain decoding is measured, or until the next trial."""
    _settling: int = _SETTLING
    pausing: bool = False
    """Whether plain decoding goes on because it is faster, not to be measured."""
    _pause: int = _SHORTEST_PAUSE
    _patience: float = _PATIENCE
    _doubt: FutilityTest = field(default_factory=FutilityTest)
    _since_change: int = 0
    _since_baseline: int = 0

    @property
    def speculative_tok_s(self) -> float:
        """Tokens per second of recent speculative rounds; 0 if there were none."""
        return self._speculative.per_second

    @property
    def plain_tok_s(self) -> float:
        """Tokens per second of recent plain rounds; 0 if there were none."""
        return self._plain.per_second

    @property
    def lost(self) -> float:
        """What speculation has lost since its best moment, in tokens of plain decoding."""
        since = self._since_best
        return since.milliseconds * self.plain_tok_s / 1e3 - since.tokens

    def observe(self, tokens: float, milliseconds: float, accepted: int, chains: int = 1) -> None:
        """A pass in the current way emitted `tokens` tokens in this time.

        Args:
            tokens: in whatever unit this pace is told of, which may be tokens of a crowd.
            milliseconds: of the pass, and of the wait before it.
            accepted: tokens of the drafter that it accepted.
            chains: requests in it whose chain came from the drafter, or could have.
        """
        self._since_baseline += 1
        self._since_change += 1
        if self._settling:
            self._settling -= 1
            return
        self._left -= 1
        if self.speculating:
            self._speculative.observe(tokens, milliseconds)
            self._since_best.observe(tokens, milliseconds, fade=1.0)
            self._doubt.observe(accepted, chains)
            self._judge()
        else:
            self._plain.observe(tokens, milliseconds)
            if self._left <= 0:
                self._end_of_plain()

    def new_text(self) -> None:
        """Another request: how drafts fare on its text is not known from the last one's."""
        if self.pausing:
            self._left = min(self._left, self._pause // _EARLIER)

    def _judge(self) -> None:
        """Another speculative round is known."""
        known = self.plain_tok_s > 0.0
        if known and self.lost <= 0.0:
            self._since_best, self._doubt = _Speed(), self._doubt.forgotten()
            if self._since_change > _TRIAL:
                self._pause, self._patience = _SHORTEST_PAUSE, _PATIENCE
        if self._doubt.settled:
            self._rest()
            return
        if not known:
            if self._left <= 0:
                self._measure_plain()
            return
        old = _FRESH if self.lost > self._patience else _STALE
        close = self.speculative_tok_s < _CLOSE * self.plain_tok_s
        if close and self._since_baseline > old:
            self._measure_plain()
        elif self.lost > self._patience:
            self._rest()

    def _end_of_plain(self) -> None:
        """A baseline or a pause is over."""
        self._since_baseline = 0
        if self.pausing:
            # Text changes: a new trial counts, not how the last one went.
            self._speculative, self._since_best = _Speed(), _Speed()
            self._change(speculating=True, rounds=_TRIAL)
        elif self.lost > self._patience:
            self._rest()
        else:
            self._change(speculating=True, rounds=_TRIAL)

    def _measure_plain(self) -> None:
        self._plain = self._plain.faded(_OLD_BASELINE)
        self._change(speculating=False, rounds=_BASELINE)

    def _rest(self) -> None:
        self._change(speculating=False, rounds=self._pause)
        self.pausing = True
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._patience = max(0.5 * self._patience, _LEAST_PATIENCE)
        self._doubt = self._doubt.confirmed()

    def _change(self, *, speculating: bool, rounds: int) -> None:
        self._settling = _SETTLING if speculating != self.speculating else 0
        self._left = rounds
        self._since_change = 0
        self.speculating = speculating
        self.pausing = False

    def memory(self) -> Trial:
        """For another run."""
        return Trial(
            speculative=self._speculative.memory(),
            plain=self._plain.memory(),
            pausing=self.pausing,
            patience=self._patience,
        )

    def recall(self, remembered: Trial) -> None:
        """Begin with what was known; where speculation did not pay, with a short pause."""
        self._speculative = _Speed.recalled(remembered.speculative)
        self._plain = _Speed.recalled(remembered.plain)
        self._patience = min(max(remembered.patience, _LEAST_PATIENCE), _PATIENCE)
        # Whether the machine still is as it was has to be seen before it ends speculation.
        self._since_baseline = _FRESH
        if remembered.pausing:
            self._change(speculating=False, rounds=_SHORTEST_PAUSE)
            self.pausing = True
