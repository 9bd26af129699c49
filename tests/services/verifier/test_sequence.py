"""For whom a shared pass waits, and for how long."""

from pathlib import Path

import pytest

from protocol.messages import OpenSequence, Sampling
from services.engine.pass_handle import PassTiming
from services.engine.runner import ModelRunner
from services.engine.scheduler import Scheduler
from services.verifier.acceptance import AcceptanceRule
from services.verifier.sequence import TargetSequence

LONGEST = 0.010
JUDGE = AcceptanceRule(OpenSequence(sequence=1, tokens=[], sampling=Sampling()), Path())


def sequence(away_s: float) -> TargetSequence:
    found = TargetSequence(state=[], rule=JUDGE, tokens=[])
    found.answered_at, found.gap_s = 100.0, away_s
    return found


def test_who_comes_back_soon_is_waited_for() -> None:
    """About twice as long as it usually takes, but no longer than the pass is worth."""
    assert sequence(0.001).wait_until(LONGEST) == pytest.approx(100.004)
    assert sequence(0.008).wait_until(LONGEST) == pytest.approx(100.010)


def test_who_drafts_first_is_not_waited_for() -> None:
    """Nor who is here already, or was never answered."""
    assert sequence(0.020).wait_until(LONGEST) == 0.0
    fresh = TargetSequence(state=[], rule=JUDGE, tokens=[])
    assert fresh.wait_until(LONGEST) == 0.0


def test_times_are_learned_from_an_idle_target() -> None:
    """A verification that comes while nothing runs says how long it was away."""
    one = sequence(0.001)
    for _ in range(20):
        one.on_request(100.007, busy_since=99.0, longest_s=LONGEST)
    assert one.gap_s == pytest.approx(0.007, rel=0.05)


def test_a_wait_in_vain_ends_the_waiting_for_a_while() -> None:
    """Who did not come in time is left out, and tried again some passes later."""
    one = sequence(0.005)
    one.on_request(100.080, busy_since=100.010, longest_s=LONGEST)
    assert one.wait_until(LONGEST) == 0.0
    assert count_passes(one) == 3


def count_passes(one: TargetSequence) -> int:
    """In which it is not waited for, until it is again."""
    passes = 0
    while one.wait_until(LONGEST) == 0.0:
        one.on_request(100.080, busy_since=100.0001, longest_s=LONGEST)
        passes += 1
    return passes


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_long_absence_is_soon_forgotten(*, is_idle: bool) -> None:
    """Of a second as of four waits; who is always that long away is not waited for."""
    one = sequence(0.001)
    for _ in range(20):
        busy_since = 99.0 if is_idle else 100.9
        one.on_request(101.0, busy_since=busy_since, longest_s=LONGEST)
    assert one.wait_until(LONGEST) == 0.0
    assert count_passes(one) == 5


def test_who_is_away_for_long_is_not_waited_for_between_long_passes() -> None:
    one = sequence(0.001)
    for _ in range(20):
        one.on_request(100.500, busy_since=99.0, longest_s=0.060)
    assert one.wait_until(0.060) == 0.0


def test_while_a_pass_goes_on_nothing_is_known_of_the_longest_wait() -> None:
    """A gap is what was seen then."""
    scheduler = Scheduler(ModelRunner(None), {}, [])
    for ended, longest_s in ((0.0, 0.0), (100.1, 0.03)):
        scheduler.last_pass = PassTiming(1, 1, started=100.0, ended=ended)
        assert scheduler.longest_wait_s == pytest.approx(longest_s)
    one = sequence(0.050)
    one.on_request(100.050, busy_since=99.0, longest_s=0.0)
    assert one.gap_s == pytest.approx(0.050)
