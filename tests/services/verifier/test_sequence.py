"""For whom a shared pass waits, and for how long."""

from pathlib import Path

import pytest

from protocol.messages import OpenSequence, Sampling
from services.verifier.acceptance import AcceptanceRule
from services.verifier.sequence import TargetSequence

LONGEST = 0.010
JUDGE = AcceptanceRule(OpenSequence(sequence=1, tokens=[], sampling=Sampling()), Path())


def sequence(away_s: float) -> TargetSequence:
    found = TargetSequence([], None, JUDGE, [])
    found.answered_at, found.gap_s = 100.0, away_s
    return found


def test_who_comes_back_soon_is_waited_for() -> None:
    """About twice as long as it usually takes, but no longer than the pass is worth."""
    assert sequence(0.001).wait_until(LONGEST) == pytest.approx(100.004)
    assert sequence(0.008).wait_until(LONGEST) == pytest.approx(100.010)


def test_who_drafts_first_is_not_waited_for() -> None:
    """Nor who is here already, or was never answered."""
    assert sequence(0.020).wait_until(LONGEST) == 0.0
    fresh = TargetSequence([], None, JUDGE, [])
    assert fresh.wait_until(LONGEST) == 0.0


def test_times_are_learned_from_an_idle_target() -> None:
    """A verification that comes while nothing runs says how long it was away."""
    one = sequence(0.001)
    for _ in range(20):
        one.on_verify(100.007, busy_since=99.0)
    assert one.gap_s == pytest.approx(0.007, rel=0.05)


def test_a_wait_in_vain_ends_the_waiting_for_a_while() -> None:
    """Who did not come in time is left out, and tried again some passes later."""
    one = sequence(0.005)
    one.on_verify(100.080, busy_since=100.010)
    assert one.wait_until(LONGEST) == 0.0
    passes = 0
    while one.wait_until(LONGEST) == 0.0:
        one.on_verify(100.080, busy_since=100.0001)
        passes += 1
    assert 3 <= passes <= 20
