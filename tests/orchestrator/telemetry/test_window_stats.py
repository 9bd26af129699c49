"""The running window: what all requests did of late, and no longer."""

import pytest

from orchestrator.telemetry.recorder import Recorder
from orchestrator.telemetry.window_stats import StatsWindow


def recorder(tokens: int = 0, rounds: int = 0, drafted: int = 0, accepted: int = 0) -> Recorder:
    made = Recorder(0.0)
    work(made, tokens, rounds, drafted, accepted)
    return made


def work(kept: Recorder, tokens: int, rounds: int = 0, drafted: int = 0, accepted: int = 0) -> None:
    kept.emitted += tokens
    kept.rounds += rounds
    kept.drafted += drafted
    kept.accepted += accepted


def keep(ledger: StatsWindow, now: float, running: list[Recorder], *, busy: bool) -> None:
    """What happens at a wake-up."""
    if ledger.wake(now, busy=busy):
        ledger.sample(now, running)


def test_nothing_has_happened() -> None:
    """An idle orchestrator has no speed, and nothing is divided by zero."""
    ledger = StatsWindow()
    keep(ledger, 5.0, [], busy=False)
    recent = ledger.recent(7.0, [])
    assert (recent.seconds, recent.busy_s, recent.tok_s) == (2.0, 0.0, 0.0)


def test_running_requests_count_together() -> None:
    """Speed and rates are those of all requests."""
    ledger, a, b = StatsWindow(), recorder(), recorder()
    keep(ledger, 0.0, [a, b], busy=True)
    work(a, tokens=10, rounds=4, drafted=8, accepted=6)
    work(b, tokens=30, rounds=6, drafted=12, accepted=9)
    a.hits, b.misses = 3, 1
    keep(ledger, 2.0, [a, b], busy=True)
    recent = ledger.recent(2.0, [a, b])
    assert (recent.tokens, recent.rounds, recent.tok_s) == (40, 10, 20.0)
    assert recent.acceptance_rate == 0.75
    assert recent.hit_rate == 0.75


def test_only_busy_time_counts() -> None:
    """The speed is that of the time in which there was something to do."""
    ledger, a = StatsWindow(), recorder()
    keep(ledger, 0.0, [], busy=False)
    keep(ledger, 3.0, [a], busy=True)  # it comes
    work(a, tokens=8)
    ledger.end(a)
    keep(ledger, 4.0, [], busy=False)  # it has gone
    keep(ledger, 8.0, [], busy=False)
    recent = ledger.recent(8.0, [])
    assert (recent.seconds, recent.busy_s, recent.tok_s, recent.requests) == (8.0, 1.0, 8.0, 1)


def test_what_ended_is_not_forgotten_at_once() -> None:
    """A request that is over goes on counting in the window, exactly once."""
    ledger, a = StatsWindow(), recorder()
    keep(ledger, 0.0, [a], busy=True)
    work(a, tokens=5, rounds=5)
    before = ledger.recent(1.0, [a])
    ledger.end(a)
    after = ledger.recent(1.0, [])
    assert (before.tokens, before.rounds) == (after.tokens, after.rounds) == (5, 5)


@pytest.mark.parametrize("pause", [0.1, 0.5, 0.7])
def test_old_work_leaves_the_window(pause: float) -> None:
    """After ten seconds nothing is left of what was done, however often somebody looked."""
    ledger, a = StatsWindow(), recorder()
    keep(ledger, 0.0, [a], busy=True)
    work(a, tokens=100)
    keep(ledger, 0.6, [a], busy=True)
    now = 0.6
    while now < 12.0:
        now += pause
        keep(ledger, now, [a], busy=True)
    recent = ledger.recent(now, [a])
    assert recent.tokens == 0
    assert 9.0 < recent.seconds < 12.0


def test_tokens_that_a_stop_string_takes_back() -> None:
    """No count looks negative."""
    ledger, a = StatsWindow(), recorder(tokens=4)
    keep(ledger, 0.0, [a], busy=True)
    work(a, tokens=-1)
    assert ledger.recent(0.5, [a]).tokens == 0
