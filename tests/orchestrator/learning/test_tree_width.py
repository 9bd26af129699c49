"""How many branches are prepared: what a step costs, and what wider and deeper trees gain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.fan_out import AFTER_ALL, AFTER_REJECTION, allocate, hit_chances
from orchestrator.learning.latency import StepLatency
from orchestrator.learning.round_observation import RoundObservation
from orchestrator.learning.tree_width import WIDTHS, TreeWidth, gains_by_depth, interpolate
from orchestrator.sequence.planner import Planner
from protocol.messages import Origin
from tests.support.fakes import observed


def test_a_step_is_a_line_in_its_branches() -> None:
    """Two widths are enough to know every other, and what the chain adds to the first depth."""
    cost = StepLatency()
    for _ in range(40):
        for branches in (8, 16):
            cost.observe(2, branches, 4.0 + 0.5 * branches)
            cost.observe(1, branches, 3.0 + 4.0 + 0.5 * branches)
    assert cost.of(12) == pytest.approx(10.0, abs=0.1)
    assert cost.of(32) == pytest.approx(20.0, abs=0.5)
    assert cost.chain_ms == pytest.approx(3.0, abs=0.3)


def test_first_depths_alone_tell_something() -> None:
    """Where no tree ever got a second depth, half of the first is taken for the step."""
    cost = StepLatency()
    assert not cost.is_known
    assert cost.of(8) == 0.0
    cost.observe(1, 16, 20.0)
    assert cost.is_known
    assert cost.of(16) + cost.chain_ms == pytest.approx(20.0)
    assert cost.of(4) < cost.of(16) < cost.of(32)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 64), st.floats(0.0, 1e6)), max_size=60))
def test_any_steps_are_survived(steps: list[tuple[int, int, float]]) -> None:
    """No time is negative, whatever was measured."""
    cost = StepLatency()
    for depth, branches, milliseconds in steps:
        cost.observe(depth, branches, milliseconds)
        assert cost.chain_ms >= 0.0
        assert all(cost.of(width) >= 0.0 for width in WIDTHS)


@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6).map(lambda w: [x / sum(w) for x in w]),
    st.integers(0, 20),
)
def test_chances_are_those_of_the_allocation(law: list[float], budget: int) -> None:
    """The chance of a hit with B branches is the sum over what `allocate` makes of them."""
    chance = hit_chances(law, budget, AFTER_REJECTION, AFTER_ALL)[budget]
    curves = [AFTER_REJECTION] * (len(law) - 1) + [AFTER_ALL]
    counts = allocate(law, budget)
    assert chance == pytest.approx(
        sum(p * curve.hit(count) for p, curve, count in zip(law, curves, counts, strict=True))
    )


def test_depth_is_worth_its_accepted_tokens() -> None:
    """As many as pay; what does not pay is not verified, and costs nothing."""
    flat = gains_by_depth(0.5, 0.1, [10.0, 10.0, 10.0])
    assert flat == pytest.approx([0.0, 0.5, 0.75])
    steep = gains_by_depth(0.5, 0.1, [10.0, 11.0, 20.0])
    assert steep == pytest.approx([0.0, 0.4, 0.4])
    places = [-1.0, 0.0, 0.5, 1.0, 1.5, 9.0]
    assert [interpolate([0.0, 4.0, 6.0], at) for at in places] == [0.0, 0.0, 2.0, 4.0, 5.0, 6.0]


def test_the_width_that_gains_most_is_used() -> None:
    """After a while; now and then a neighbour is tried, and a trifle changes nothing."""
    width = TreeWidth()
    used = [width.branches]
    for gains in [(1.0, 0.5, 0.4, 0.3)] * 60:
        width.observe(gains)
        used.append(width.branches)
    assert used[0] == 16
    assert used[30:].count(4) >= 28
    assert set(used[30:]) <= {4, 8}
    for _ in range(99):
        width.observe((1.0, 1.01, 0.0, 0.0))
    assert width.branches in {4, 8}
    width.observe((1.0, 1.01, 0.0, 0.0))
    assert width.branches == 4


def _taught(step_ms: float, slope: float) -> int:
    """Branches after rounds of 20 ms beside steps of `step_ms` and `slope` per branch more."""
    estimates = CostModel()
    plan = Planner("ssd", estimates)
    for _ in range(100):
        branches = plan.branches
        for depth in (1, 2):
            estimates.observe_step(depth, branches, step_ms + slope * branches)
        used = plan.should_speculate
        estimates.observe_round(_lesson("hit", 2, prepared=4, rank=1, speculating=used))
    return plan.branches


def _lesson(
    origin: Origin,
    accepted: int,
    *,
    prepared: int = 0,
    rank: int | None = None,
    speculating: bool = True,
) -> RoundObservation:
    return observed(
        speculating=speculating,
        origin=origin,
        confidences=[0.75] * 3,
        accepted=accepted,
        prepared=prepared,
        rank=rank,
        verify_ms=20.0,
        idle_ms=0.1,
    )


def test_cheap_branches_are_many_and_dear_ones_few() -> None:
    """T_d(B) decides."""
    assert _taught(0.5, 0.0) >= 16 > _taught(1.0, 2.0)


def test_a_drafter_that_takes_no_time_gets_wide_trees() -> None:
    """A look-up may be faster than the clock can see."""
    assert _taught(0.0, 0.0) >= 16


def test_one_bad_backup_is_no_verdict() -> None:
    """The rate of backups begins with that of hits, and goes back to it when not tried."""
    estimates = CostModel()
    assert estimates.backup_rate > 0.8  # nothing is known: hope
    estimates.observe_step(1, 16, 5.0)
    for _ in range(30):
        estimates.observe_round(_lesson("hit", 3))
    before = estimates.backup_rate
    assert before > 0.9
    estimates.observe_round(_lesson("miss", 0))
    assert 0.7 * before < estimates.backup_rate < before
    for _ in range(40):
        estimates.observe_round(_lesson("miss", 0))
    assert estimates.backup_rate < 0.2
    for _ in range(500):
        estimates.observe_round(_lesson("hit", 3))
    assert estimates.backup_rate > 0.9
