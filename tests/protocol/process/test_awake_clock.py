"""Time in which a process itself was not awake is no time that others were late."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.process import deadline
from protocol.process.awake_clock import AwakeClock
from protocol.process.deadline import Deadline


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(-10.0, 1e6, width=32)))
def test_no_step_counts_more_than_the_longest(steps: list[float]) -> None:
    """Whatever the clock below does, each reading adds its step, within 0 and the longest."""
    time = Time()
    clock = AwakeClock(time, longest_step_s=1.0)
    before = clock.read()
    for step in steps:
        time.now += step
        after = clock.read()
        assert after - before == pytest.approx(
            min(max(step, 0.0), 1.0), abs=1e-6 * max(1.0, abs(step))
        )
        before = after


def test_a_deadline_waits_for_those_who_were_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of sleep take no more of it than one step; seconds awake take themselves."""
    time = Time()
    clock = AwakeClock(time, longest_step_s=1.0)
    monkeypatch.setattr(deadline, "awake_time", clock.read)
    wait = Deadline(5.0)
    time.now += 7200.0
    assert wait.remaining == pytest.approx(4.0)
    for _ in range(4):
        assert not wait.passed
        time.now += 1.0
        clock.read()
    assert wait.passed
