"""The restart budget: so many within a window, and a total that never falls."""

from hypothesis import given
from hypothesis import strategies as st

from launch.stack.child import RestartBudget


def test_a_burst_is_granted_until_the_budget_is_spent() -> None:
    """Within the window there are exactly as many restarts as the budget has."""
    budget = RestartBudget(3, 60.0)
    assert [budget.spend(float(t)) for t in range(5)] == [True, True, True, False, False]
    assert budget.used == 3


def test_time_gives_restarts_back() -> None:
    """A restart counts until it is older than the window."""
    budget = RestartBudget(2, 10.0)
    assert [budget.spend(t) for t in (0.0, 6.0, 10.0)] == [True, True, False]
    assert [budget.spend(t) for t in (10.1, 16.0, 16.1)] == [True, False, True]
    assert budget.used == 4


def test_no_budget_is_no_restart() -> None:
    """A budget of zero refuses the first restart."""
    assert not RestartBudget(0, 60.0).spend(0.0)


@given(
    st.integers(0, 4),
    st.floats(0.5, 20.0),
    st.lists(st.floats(0.0, 100.0), max_size=40).map(sorted),
)
def test_no_window_holds_more_than_the_budget(
    restarts: int, window_s: float, times: list[float]
) -> None:
    """Whenever restarts are asked for, no window has more than it may, and none is wasted."""
    budget = RestartBudget(restarts, window_s)
    granted: list[float] = []
    for now in times:
        recent = sum(1 for t in granted if now - t <= window_s)
        expected = recent < restarts
        assert expected is budget.spend(now)
        granted += [now] * expected
    assert len(granted) == budget.used
