"""What is learned at work: the cost of a verification, and the worth of a confidence."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.learning.averages import Ema
from orchestrator.learning.calibration import Calibration
from orchestrator.learning.latency import VerifyLatency
from orchestrator.learning.round_observation import RoundObservation
from orchestrator.sequence.planner import Planner
from protocol.decoding.token_tree import CHAIN_ROWS
from protocol.messages import Mode, PassTimes
from tests.support.fakes import chain_of, judged, observed

CONFIDENCES = st.lists(st.floats(0.0, 1.0), max_size=8)


def cost_of(**milliseconds: float) -> VerifyLatency:
    cost = VerifyLatency()
    cost.expect({int(tokens.removeprefix("m")): value for tokens, value in milliseconds.items()})
    return cost


def test_unmeasured_costs_grow_with_the_tokens() -> None:
    """Before any measurement, more tokens cost more, but less than in proportion."""
    cost = VerifyLatency()
    assert cost.of(1) < cost.of(2) < cost.of(8) < 8 * cost.of(1)


def test_measured_costs_are_told() -> None:
    """What was measured is what is told, and what lies between lies between."""
    cost = cost_of(m1=10.0, m5=30.0)
    assert tuple(map(cost.of, (1, 2, 3, 5))) == (10.0, 15.0, 20.0, 30.0)


@pytest.mark.parametrize("tokens", [2, 4])
def test_costs_are_extrapolated(tokens: int) -> None:
    """Beyond what was measured, costs keep the assumed shape at the measured scale."""
    assumed = VerifyLatency()
    scale = 12.0 / assumed.of(3)
    assert scale * assumed.of(tokens) == pytest.approx(cost_of(m3=12.0).of(tokens))


def test_costs_follow_slowly_and_ignore_outliers() -> None:
    """One slow verification barely shows, a lasting change does."""
    cost = cost_of(m1=10.0)
    cost.observe(1, 10_000.0)
    assert 10.0 < cost.of(1) < 12.0
    for _ in range(100):
        cost.observe(1, 20.0)
    assert cost.of(1) == pytest.approx(20.0, rel=0.01)


def test_an_untaught_calibration_believes_the_drafter() -> None:
    """At first a token's rate is its confidence, to the width of a bin."""
    calibration = Calibration()
    for hundredth in range(101):
        confidence = hundredth / 100
        assert calibration.rate(confidence) == pytest.approx(confidence, abs=0.051)


@pytest.mark.parametrize("accepted", [0, 1])
def test_calibration_learns(accepted: int) -> None:
    """A confidence whose tokens always stand, or always fall, comes to mean that."""
    calibration = Calibration()
    for _ in range(500):
        calibration.observe(0.55, accepted=bool(accepted))
    assert calibration.rate(0.55) == pytest.approx(accepted, abs=0.02)
    assert calibration.rate(0.95) == Calibration().rate(0.95)


def test_tokens_behind_the_first_rejection_teach_nothing() -> None:
    """Of a chain, the accepted tokens and the first rejected one were judged; no others."""
    estimates, fresh = judged(), Calibration()
    confidences = [0.95, 0.75, 0.55, 0.35]
    estimates.observe_round(lesson(origin="hit", confidences=confidences, accepted=1))
    calibration = estimates.calibrations["hit"]
    assert calibration.rate(0.95) > fresh.rate(0.95)
    assert calibration.rate(0.75) < fresh.rate(0.75)
    assert fresh.rate(0.55) == calibration.rate(0.55)
    assert fresh.rate(0.35) == calibration.rate(0.35)


@given(CONFIDENCES, st.integers(0, 8), st.floats(0.0, 1.0))
def test_rates_are_probabilities(confidences: list[float], accepted: int, other: float) -> None:
    """Whatever was observed, a rate lies between 0 and 1."""
    calibration = Calibration()
    for _ in range(20):
        for index, confidence in enumerate(confidences):
            calibration.observe(confidence, accepted=index < accepted)
    assert 0.0 <= calibration.rate(other) <= 1.0


def plan(mode: Mode = "ssd", *, num_draft_tokens: int = 0, fixed_branches: int = 0) -> Planner:
    return Planner(mode, judged(), num_draft_tokens, fixed_branches)


@given(CONFIDENCES, st.integers(1, 6))
def test_a_lookahead_that_was_asked_for_is_kept(
    confidences: list[float], num_draft_tokens: int
) -> None:
    """With a lookahead given, that many tokens are verified whatever their confidence."""
    fixed = plan(num_draft_tokens=num_draft_tokens)
    assert fixed.depth == num_draft_tokens
    assert min(num_draft_tokens, len(confidences)) == len(
        fixed.choose_nodes(chain_of(confidences), "hit")
    )


@given(CONFIDENCES)
def test_a_chosen_length_is_one_of_the_draft(confidences: list[float]) -> None:
    """The planner takes a beginning of the draft, possibly none of it."""
    assert 0 <= len(plan().choose_nodes(chain_of(confidences), "hit")) <= len(confidences)


def test_sure_tokens_are_verified_and_doubtful_ones_are_not() -> None:
    """A draft is cut where its tokens are no longer worth their verification."""
    assert len(plan().choose_nodes(chain_of([0.99, 0.99, 0.99]), "hit")) == 3
    assert len(plan().choose_nodes(chain_of([0.99, 0.99, 0.01]), "hit")) == 2
    assert len(plan().choose_nodes(chain_of([0.01, 0.99]), "hit")) == 0
    assert len(plan().choose_nodes(chain_of([]), "hit")) == 0


@given(CONFIDENCES, st.lists(st.floats(1.0, 100.0), min_size=9, max_size=9).map(sorted))
def test_the_chosen_length_is_the_best(confidences: list[float], costs: list[float]) -> None:
    """No other beginning of a size that passes have is worth more: tokens less time."""
    estimates = judged()
    estimates.verify_latency.expect(dict(enumerate(costs, start=1)))

    def worth(count: int) -> float:
        expected, reached = 1.0, 1.0
        for confidence in confidences[:count]:
            reached *= estimates.calibrations["hit"].rate(confidence)
            expected += reached
        return expected - costs[count] / costs[0]

    best = max(worth(rows - 1) for rows in CHAIN_ROWS if rows - 1 <= len(confidences))
    assert worth(
        len(Planner("ssd", estimates).choose_nodes(chain_of(confidences), "hit"))
    ) == pytest.approx(best)


@settings(max_examples=200)
@given(
    CONFIDENCES,
    CONFIDENCES,
    st.lists(st.floats(0.0, 8.0), min_size=9, max_size=9),
    st.integers(0, 8),
)
def test_what_was_drawn_does_not_decide_its_own_use(
    confidences: list[float], others: list[float], steps: list[float], shared: int
) -> None:
    """For sampled drafts, a token's use depends on its own law and those before it alone.

    The law of a token is what its draw does not change; the laws after it, it does.
    """
    estimates = judged()
    estimates.verify_latency.expect({m: 10.0 + sum(steps[:m]) for m in range(1, 10)})
    sampled = Planner("ssd", estimates, sampled=True)
    count = min(len(confidences), len(others))
    first, other = confidences[:count], [*confidences[:shared], *others[shared:]][:count]
    assert min(shared, len(sampled.choose_nodes(chain_of(first), "hit"))) == min(
        shared, len(sampled.choose_nodes(chain_of(other), "hit"))
    )
    # While the target waits, drafting ends at the first token that is not worth it.
    lengths = [
        len(sampled.choose_nodes(chain_of(first[:size]), "hit")) for size in range(count + 1)
    ]
    ends = next((size for size, length in enumerate(lengths) if length < size), count + 1)
    assert all(length == size for size, length in enumerate(lengths[:ends]))
    assert ends > count or lengths[ends] == ends - 1


def test_the_next_token_has_no_say_in_this_ones_use() -> None:
    """Where the fastest length would take the first token for the second's sake, or leave it."""
    estimates = judged()
    estimates.verify_latency.expect({1: 10.0, 2: 15.0, 3: 15.5})
    fastest, sampled = Planner("ssd", estimates), Planner("ssd", estimates, sampled=True)
    assert [
        len(fastest.choose_nodes(chain_of([0.4, 0.99]), "hit")),
        len(fastest.choose_nodes(chain_of([0.4, 0.01]), "hit")),
    ] == [2, 0]
    assert [
        len(sampled.choose_nodes(chain_of([0.4, 0.99]), "hit")),
        len(sampled.choose_nodes(chain_of([0.4, 0.01]), "hit")),
    ] == [2, 1]


def test_sampled_drafts_go_on_where_going_on_pays() -> None:
    """A step in the cost does not end a draft whose tokens are all sure."""
    estimates = judged()
    estimates.verify_latency.expect({1: 10.0, 2: 21.0, 3: 22.0, 4: 23.0, 5: 24.0})
    sampled = Planner("ssd", estimates, sampled=True)
    assert len(sampled.choose_nodes(chain_of([0.99] * 4), "hit")) == 4
    assert len(sampled.choose_nodes(chain_of([0.99]), "hit")) == 0
    assert len(sampled.choose_nodes(chain_of([0.01, 0.99, 0.99, 0.99]), "hit")) == 0


@pytest.mark.parametrize(
    ("num_draft_tokens", "budget", "expected"), [(0, 0, 1), (4, 20, 4), (6, 3, 1)]
)
def test_saguaro_holds_back_what_a_row_can_expect(
    num_draft_tokens: int, budget: int, expected: int
) -> None:
    """F is the branches that each acceptance length gets on average, at least one."""
    assert expected == plan(num_draft_tokens=num_draft_tokens, fixed_branches=budget).held_back


@given(CONFIDENCES, st.integers(0, 64))
def test_fan_out_fits_the_chain(confidences: list[float], budget: int) -> None:
    """There is one count per acceptance length, and they sum to the budget or its default."""
    counts = plan(fixed_branches=budget).fan_out(chain_of(confidences), "hit")
    assert len(counts) == len(confidences) + 1
    assert sum(counts) == (budget or sum(plan().fan_out(chain_of([]), "hit")))


def lesson(**changes: Any) -> RoundObservation:
    """A round that hit the second of four candidates after its one draft token fell."""
    fields = {"confidences": [0.5], "prepared": 4, "rank": 1, "verify_ms": 40.0, "idle_ms": 10.0}
    return observed(**{**fields, **changes})


def test_a_fixed_lookahead_says_nothing_about_the_planner() -> None:
    """The speed at a lookahead fixed by hand is not held against adaptive speculation."""
    for by_hand in (False, True):
        estimates = judged()
        for _ in range(10):
            estimates.observe_round(lesson(by_hand=by_hand))
        switch = estimates.switch("ssd")
        assert switch is not None
        assert switch.speculative_tok_s == pytest.approx(0.0 if by_hand else 20.0, rel=0.1)
        assert estimates.verify_latency.of(2) == 40.0


def test_a_mean_counts_its_first_samples_in_full() -> None:
    """At first it is the plain average; later old samples fade."""
    mean = Ema(0.5)
    assert mean.value == 0.5
    mean.observe(2.0)
    assert mean.value == 2.0
    mean.observe(4.0)
    assert 3.0 <= mean.value < 3.2
    for _ in range(100):
        mean.observe(10.0)
    assert mean.value == pytest.approx(10.0, abs=0.01)
    mean.observe(0.0)
    assert mean.value == pytest.approx(9.0, abs=0.05)


# ---------------------------------------------------------------- several requests at once


def test_two_requests_speculate_and_three_do_not() -> None:
    """With more than two nothing is drafted or looked up, whatever paid or was fixed by hand."""
    estimates = judged()
    for mode in ("sd", "ssd"):
        for by_hand in (0, 3):
            planner = Planner(mode, estimates, by_hand)
            decisions = []
            for streams in (1, 2, 3, 16, 2, 1):
                estimates.streams = streams
                decisions.append((planner.should_speculate, planner.looks_up))
            alone = (True, True)
            assert decisions == [alone, alone, (False, False), (False, False), alone, alone]


def test_one_and_two_requests_are_judged_apart() -> None:
    """What a request gains alone says little of a pass that it shares."""
    estimates = judged()
    estimates.streams = 2
    while estimates.switch("ssd").speculating:  # type: ignore[union-attr]  # two may speculate
        estimates.observe_round(lesson(since_last_ms=90.0, accepted=0, rank=None))
    estimates.streams = 1
    assert Planner("ssd", estimates).should_speculate


def test_two_requests_share_the_branches_and_nobody_waits() -> None:
    """The pass of the other request would leave without one that waits for a draft."""
    estimates = judged()
    estimates.backup_ms.observe(1.0)
    estimates.verify_latency.expect({1: 50.0})
    planner = Planner("ssd", estimates)
    assert (planner.branches, planner.backup_length() > 0) == (8, True)
    estimates.streams = 2
    assert (planner.branches, planner.backup_length()) == (4, 0)
    assert Planner("ssd", estimates, num_draft_tokens=3).backup_length() == 3
    assert Planner("ssd", estimates, fixed_branches=12).branches == 12


def test_reading_what_was_missed_is_no_cost_of_a_token() -> None:
    """T_d is the time between two tokens; what the first one takes besides is a wait's own cost."""
    estimates = judged()
    estimates.plain_latency.expect({1: 40.0})
    estimates.expect_passes(PassTimes(chains={1: 30.0}), "drafter")
    for depth in (1, 4) * 20:
        estimates.observe_wait(depth, 18.0, 18.0 + 10.0 * (depth - 1))
    assert estimates.draft_token_ms == pytest.approx(10.0, abs=0.5)
    assert estimates.wait_overhead_ms == pytest.approx(8.0, abs=1.0)
    estimates.observe_wait(2, 1e5, 2e5)  # a stall says little
    assert estimates.wait_overhead_ms < 30.0
    assert estimates.draft_token_ms < 30.0


def test_a_program_may_send_all_tokens_at_once() -> None:
    """Then each cost its share of the time."""
    estimates = judged()
    estimates.observe_wait(4, 40.0, 40.0)
    assert (estimates.draft_token_ms, estimates.wait_overhead_ms) == (10.0, 0.0)


def test_a_row_of_one_costs_the_other_time_too() -> None:
    """Doubtful drafts that are verified alone are left out of a shared pass."""
    estimates = judged()
    estimates.verify_latency.expect({1: 48.0, 16: 168.0})
    draft, lengths = chain_of([0.45] * 4), []
    for streams in (1, 2):
        estimates.streams = streams
        lengths.append(len(Planner("ssd", estimates).choose_nodes(draft, "hit")))
    assert lengths[0] > lengths[1]


# ---------------------------------------------------------------- beside, or in turn


@pytest.mark.parametrize(
    ("beside_ms", "token_ms", "in_turn"),
    [(15.0, 1.0, True), (7.0, 1.0, False), (9.0, 6.0, False)],
)
def test_drafts_are_made_in_turn_where_the_target_is_slower_beside_them(
    beside_ms: float,
    token_ms: float,
    in_turn: bool,  # noqa: FBT001  # pytest names it
) -> None:
    """On two cores a pass takes 15 ms beside the drafter and 7 without: longer than a draft."""
    estimates = judged()
    estimates.backup_ms.observe(token_ms)
    planner = Planner("ssd", estimates)
    for _ in range(8):
        estimates.observe_round(lesson(verify_ms=beside_ms, accepted=1))
        plain = {"speculating": False, "confidences": [], "accepted": 0, "prepared": 0}
        estimates.observe_round(lesson(verify_ms=6.5, rank=None, origin="target", **plain))
    assert planner.is_in_turn is in_turn
    assert planner.prepares is not in_turn
    assert Planner("sd", estimates).is_in_turn
    assert not Planner("ssd", estimates, num_draft_tokens=3).is_in_turn
