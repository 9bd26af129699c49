"""The simulator's own models: times, tokens and services behave as they are described."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.simulation.bound import (
    Rounds,
    upper_bound_tok_s,
)
from orchestrator.simulation.event_queue import EventQueue
from orchestrator.simulation.latency_curve import curve
from orchestrator.simulation.oracle import Oracle
from orchestrator.simulation.run import Run, simulate
from orchestrator.simulation.scenario import AcceptanceModel, Device, Scenario, Strategy
from protocol.errors import UsageError

PLAIN, SEQUENTIAL, ADAPTIVE = Strategy(mode="ar"), Strategy(mode="sd"), Strategy()


def run(strategy: Strategy, tokens: int = 400, alpha: float = 0.6, **device: float | str) -> Run:
    times = {"t_verify": 20.0, "t_draft": 2.0, "jitter": 0.0, "ipc": 0.1} | device
    scenario = Scenario(
        device=Device(**times), acceptance=AcceptanceModel(alpha=alpha), tokens=tokens
    )
    return simulate(scenario, strategy)


@pytest.mark.parametrize(
    ("text", "count", "milliseconds"),
    [
        (49, 7, 49.0),
        ("49", 1, 49.0),
        ("1:49,2:54,6:79", 1, 49.0),
        ("1:49,2:54,6:79", 4, 66.5),
        ("1:49,2:54,6:79", 10, 104.0),
        ("2:50,1:40", 2, 50.0),
        ("4:10", 1, 10.0),
        ("1:20,2:10", 9, 10.0),
    ],
)
def test_a_curve_is_straight_between_its_points(
    text: float | str, count: int, milliseconds: float
) -> None:
    """Between points and behind them, and never below the shortest time."""
    assert curve(text).of(count) == pytest.approx(milliseconds)


@pytest.mark.parametrize("text", ["", "fast", "1:2:3", "0:5", "1:-3", "1:nan", "1:", -1])
def test_a_curve_that_makes_no_sense_is_refused(text: float | str) -> None:
    """Whatever is not a time, or a time below zero."""
    with pytest.raises(UsageError):
        curve(text)


def test_events_happen_in_order() -> None:
    """By time; those of one instant in the order in which they were planned."""
    agenda, order = EventQueue(), []
    for name, delay in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        agenda.after(delay, lambda name=name: order.append((name, agenda.now)))
    while agenda.step():
        pass
    assert order == [("a", 1.0), ("b", 1.0), ("c", 2.0)]


@pytest.mark.parametrize("acceptance", [
    AcceptanceModel(alpha=0.6),
    AcceptanceModel(alpha=0.6, insight=0.0),
    AcceptanceModel(alpha=0.6, burst=0.7, insight=0.6),
    AcceptanceModel(alpha=0.3, burst=1.0, stretch=4.0),
    AcceptanceModel(alpha=0.9, r=1.0, first=0.0),
])  # fmt: skip
def test_a_script_obeys_its_laws(acceptance: AcceptanceModel) -> None:
    """Acceptance, calibration of the confidence, and hits by fan-out after a rejection."""
    count = 60_000
    script = Oracle(acceptance, count, seed=1)
    accepted = np.array([script.token(p) == script.best_guess(p) for p in range(count)])
    sure = np.array([script.confidence(p, on_track=True) for p in range(count)])
    assert accepted.mean() == pytest.approx(acceptance.alpha, abs=0.02)
    high = sure >= np.median(sure)
    assert accepted[high].mean() == pytest.approx(sure[high].mean(), abs=0.02)
    rejected = np.flatnonzero(~accepted).tolist()
    for wide in (1, 2, 4, 16):
        hits = np.mean(
            [script.token(p) in script.bonuses(p, wide, rejected=True) for p in rejected]
        )
        assert hits == pytest.approx(1 - (1 - acceptance.first) * wide**-acceptance.r, abs=0.02)


def test_insight_is_the_explained_variance() -> None:
    """The confidence explains that share of the variance of acceptance."""
    script = Oracle(AcceptanceModel(alpha=0.6, insight=0.4), 60_000, seed=3)
    sure = [script.confidence(p, on_track=True) for p in range(60_000)]
    assert np.var(sure) / (0.6 * 0.4) == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize("has_curve", [True, False])
def test_the_law_where_all_was_accepted(has_curve: bool) -> None:  # noqa: FBT001  # pytest names it
    """Given by itself, or what follows from acceptance and the law after a rejection."""
    both = {"r_all": 0.8, "first_all": 0.7} if has_curve else {}
    script = Oracle(AcceptanceModel(alpha=0.6, first=0.3, r=0.5, **both), 60_000, seed=2)
    for wide in (1, 3, 8):
        hits = np.mean(
            [script.token(p) in script.bonuses(p, wide, rejected=False) for p in range(60_000)]
        )
        behind = 1 - 0.7 * (wide - 1) ** -0.5 if wide > 1 else 0.0
        assert hits == pytest.approx(
            1 - 0.3 * wide**-0.8 if has_curve else 0.6 + 0.4 * behind, abs=0.01
        )
        assert len(set(script.bonuses(7, wide, rejected=False))) == wide


def test_half_a_law_is_refused() -> None:
    """A curve has two parameters."""
    with pytest.raises(UsageError, match="give both"):
        Oracle(AcceptanceModel(alpha=0.5, r_all=1.0), 10, seed=0)


def test_plain_decoding_takes_its_time() -> None:
    """A verification and two messages per token, exactly."""
    result = run(PLAIN)
    assert result.tok_s == pytest.approx(1e3 / 20.0)
    assert result.bound_tok_s == pytest.approx(1e3 / 20.0)


def test_sequential_rounds_take_their_time() -> None:
    """K draft steps, a verification, four messages; all of it in turn."""
    result = run(Strategy(mode="sd", num_draft_tokens=3), alpha=1.0)
    assert result.statistics.mean_acceptance_length == pytest.approx(4.0, abs=0.1)
    assert result.tok_s == pytest.approx(4e3 / (20 + 3 * 2 + 0.4), rel=0.02)
    assert result.statistics.overlap_ratio == 0.0


def test_drafts_of_a_perfect_drafter_cost_no_time() -> None:
    """All of them are prepared while the target works."""
    result = run(Strategy(num_draft_tokens=3), alpha=1.0)
    assert result.statistics.hit_rate == 1.0
    assert result.tok_s == pytest.approx(4e3 / 20.2, rel=0.03)


def test_a_whole_tree_is_waited_for() -> None:
    """With T_p above T_v a round takes T_p: the chain's step, then K of the tree."""
    result = run(Strategy(num_draft_tokens=3), alpha=1.0, t_draft=8.0, whole_tree=True)
    assert result.tok_s == pytest.approx(4e3 / (8.0 + 3 * 8.0 + 0.2), rel=0.03)


def test_contention_slows_verification() -> None:
    """While the drafter works, and no longer."""
    free, shared = (
        run(Strategy(num_draft_tokens=2, branches=8), contention=c).statistics.phase_ms["verify"]
        for c in (0.0, 0.5)
    )
    busy = 3 * 2.0  # the chain's step and two of the tree, by whose slowness T_v grows
    assert free == pytest.approx(20.0)
    assert shared == pytest.approx(20.0 + busy / 3, abs=0.1)


@given(
    st.sampled_from([PLAIN, SEQUENTIAL, ADAPTIVE, Strategy(num_draft_tokens=5, branches=3)]),
    st.floats(0.0, 1.0),
    st.sampled_from([0.5, 5.0, 30.0, 90.0]),
    st.booleans(),
)
def test_any_device_decodes(
    strategy: Strategy,
    alpha: float,
    t_draft: float,
    whole_tree: bool,  # noqa: FBT001  # hypothesis names it
) -> None:
    """All tokens come, in no less time than the bound allows."""
    result = run(strategy, 60, alpha, t_draft=t_draft, whole_tree=whole_tree)
    statistics = result.statistics
    assert 60 <= statistics.accepted + statistics.rounds <= 61
    assert 0.0 < result.efficiency < 1.0 + 1e-9


def test_a_simulation_repeats() -> None:
    """The seed decides everything."""

    def decode(seed: int) -> Run:
        acceptance = AcceptanceModel(alpha=0.7, burst=0.4)
        device = Device(t_verify="1:20,5:30", t_draft=3.0)
        return simulate(
            Scenario(device=device, acceptance=acceptance, tokens=300, seed=seed), ADAPTIVE
        )

    assert decode(1) == decode(1)
    assert decode(1) != decode(2)


def test_the_bound_counts_waiting_for_a_backup() -> None:
    """p E_hit + (1-p) E_miss over p T_v + (1-p)(T_v + T_b)."""
    hit, miss = Rounds(), Rounds()
    for _ in range(3):
        hit.add(4, 10.0)
    miss.add(2, 12.0)
    assert upper_bound_tok_s(hit, miss, 8.0) == pytest.approx(1e3 * 14 / 50.0)
    assert upper_bound_tok_s(Rounds(), Rounds(), 0.0) == 0.0


def test_a_link_adds_its_latency_and_the_time_of_what_it_carries() -> None:
    """T_v(m) grows by exchanges x (latency + m x bytes / bandwidth)."""
    link = {"exchanges": 60, "link_ms": 0.1, "exchange_bytes": 5000.0, "link_mbytes_per_s": 100.0}
    device = Device(t_verify=20.0, t_draft=2.0, **link)
    assert device.exchange_ms(4) == pytest.approx(60 * (0.1 + 4 * 0.05))
    plain = run(PLAIN, **link)
    assert plain.tok_s == pytest.approx(1e3 / (20.0 + 60 * 0.15 + 0.2), rel=0.02)


def test_a_slow_link_makes_speculation_pay_more() -> None:
    """Latency is paid once per pass, however many tokens it verifies."""
    gains = []
    for link_ms in (0.0, 0.2, 1.0):
        link = {"exchanges": 64, "link_ms": link_ms}
        gains.append(run(ADAPTIVE, alpha=0.8, **link).tok_s / run(PLAIN, **link).tok_s)
    assert gains == sorted(gains)
    assert gains[2] > 1.05 * gains[0]
