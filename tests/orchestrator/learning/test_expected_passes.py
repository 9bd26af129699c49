"""What the verifier measured at load is where the planner starts, and what rounds take corrects."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.latency import VerifyLatency
from orchestrator.sequence.planner import Planner
from protocol.messages import PROTOCOL_VERSION, Hello, PassTimes, Role
from tests.support.fakes import chain_of, observed

FLAT = {1: 5.5, 2: 6.3, 4: 6.4, 8: 6.9, 16: 7.5, 32: 8.5}
"""Of a GPU that reads 16 GB of weights in any case."""
STEEP = {1: 10.0, 2: 12.0, 4: 16.0, 8: 32.0, 16: 60.0}
"""Of one core."""

ROUND = observed(confidences=[0.8] * 3, accepted=2, verify_ms=6.4, idle_ms=0.5)
PLAIN = observed(speculating=False, origin="target", verify_ms=5.5, idle_ms=0.5)


def expecting(chains: dict[int, float]) -> CostModel:
    estimates = CostModel()
    estimates.expect_passes(PassTimes(chains=chains))
    return estimates


@pytest.mark.parametrize(("chains", "fewest", "most"), [(FLAT, 6, 8), (STEEP, 1, 5)])
def test_the_first_drafts_are_as_long_as_pays(
    chains: dict[int, float], fewest: int, most: int
) -> None:
    """Nothing was verified yet: further rows are as dear as they were at load."""
    planner = Planner("ssd", expecting(chains))
    assert fewest <= len(planner.choose_nodes(chain_of([0.85] * 8), "hit")) <= most


def test_times_at_load_hold_between_and_beyond_what_was_measured() -> None:
    """Straight lines; without them it is assumed what a token costs."""
    latency = VerifyLatency()
    latency.expect({1: 10.0, 2: 12.0, 4: 20.0})
    assert [latency.of(rows) for rows in (1, 2, 3, 4, 6)] == [10.0, 12.0, 16.0, 20.0, 28.0]
    latency.expect({1: 10.0})
    assert latency.of(1) == 10.0 < latency.of(2) < latency.of(8)
    latency.expect({})
    assert not latency.is_known


def test_a_pass_that_stalled_at_load_does_not_end_speculation() -> None:
    """Two rows were timed while another program used the cores; plain decoding never times them
    again, and drafts would seem to cost several tokens each.
    """
    latency = VerifyLatency()
    latency.expect({1: 76.0, 2: 445.0, 4: 114.0, 8: 153.0})
    assert [latency.of(rows) for rows in (1, 2, 4, 8)] == [76.0, 114.0, 114.0, 153.0]
    estimates = expecting({1: 76.0, 2: 445.0, 4: 114.0, 8: 153.0})
    estimates.expect_passes(PassTimes(chains={1: 4.0}), "drafter")
    assert estimates._least_loss_ms("sd") < 76.0


@pytest.mark.parametrize(("times", "one_in"), [(2.0, 2), (2.0, 10), (3.0, 2), (3.0, 10)])
def test_a_size_that_is_dear_again_and_again_is_believed(times: float, one_in: int) -> None:
    """A pass over nine rows may go another way than one over eight, however seldom it is."""
    latency = VerifyLatency()
    latency.expect(FLAT)
    for number in range(40 * one_in):
        rows, ms = (9, times * 7.0) if number % one_in == 0 else (3, 6.35)
        latency.observe(rows, ms)
    for _ in range(20):
        latency.observe(3, 6.35)
    assert latency.of(9) == pytest.approx(times * 7.0, rel=0.1)
    assert latency.of(3) == pytest.approx(6.35, rel=0.1)


def test_deviations_are_interpolated_between_measured_sizes() -> None:
    """Beyond them, a size deviates as its nearest neighbour does."""
    usual, seen = VerifyLatency(), VerifyLatency()
    for cost in (usual, seen):
        cost.expect(dict.fromkeys((1, 2, 4, 8, 64), 10.0))
    for _ in range(500):
        for rows, factor in ((2, 1.0), (6, 1.4)):
            seen.observe(rows, factor * usual.of(rows))
    low, high = seen.of(2), seen.of(6)
    assert high == pytest.approx(1.4 * low, rel=0.02)
    assert seen.of_up_to(1, 8) == pytest.approx(
        [low, low, *(low + part * (high - low) for part in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0))]
    )
    assert seen.of(100) == pytest.approx(seen.of(64)) == pytest.approx(high)
    assert seen.of_up_to(64, 100) == pytest.approx([high] * 37)


def test_two_neighbours_do_not_make_further_rows_free() -> None:
    """Of a slow target only a few sizes are timed."""
    latency = VerifyLatency()
    latency.expect({1: 10.0, 2: 12.0, 4: 16.0, 5: 20.0, 6: 26.2, 8: 26.0})
    assert latency.of(16) > 40.0


@pytest.mark.parametrize("factor", [0.5, 2.5])
def test_the_pace_of_all_rows_follows_that_of_some(factor: float) -> None:
    """The machine is busier, or quieter, than at load."""
    latency = VerifyLatency()
    latency.expect(STEEP)
    for _ in range(30):
        for rows in (1, 2, 4):
            latency.observe(rows, factor * STEEP[rows])
    assert latency.of(8) == pytest.approx(factor * STEEP[8], rel=0.15)


@pytest.mark.parametrize(("contended", "factor"), [({1: 11.0, 8: 33.0}, 2.0), ({}, 1.0)])
def test_a_busier_machine_is_busier_beside_a_drafter_too(
    contended: dict[int, float], factor: float
) -> None:
    """If both were timed: otherwise drafting in parallel would seem to have become cheap."""
    estimates = CostModel()
    estimates.expect_passes(PassTimes(chains=STEEP, contended=contended))
    before = estimates.verify_latency.of(8)
    for _ in range(60):
        for rows in (1, 2, 4, 8):
            estimates.plain_latency.observe(rows, 2.0 * STEEP[rows])
    assert estimates.verify_latency.of(8) == pytest.approx(factor * before, rel=0.1)
    assert estimates.plain_latency.of(8) == pytest.approx(2.0 * STEEP[8], rel=0.1)


def test_contention_is_no_busier_machine() -> None:
    """Passes beside a drafter that are slower than at load say nothing of those without it."""
    estimates = CostModel()
    estimates.expect_passes(PassTimes(chains=STEEP, contended=STEEP))
    for _ in range(20):
        estimates.verify_latency.observe(4, 1.4 * STEEP[4])
    assert estimates.verify_latency.of(4) == pytest.approx(1.4 * STEEP[4], rel=0.1)
    assert estimates.plain_latency.of(4) == STEEP[4]


def test_nothing_is_planned_in_parallel_where_drafts_are_made_in_turn() -> None:
    """In mode sd, however quick a pass beside the drafter was."""
    estimates = CostModel()
    estimates.expect_passes(PassTimes(chains=STEEP, contended={1: 5.0, 8: 9.0}))
    estimates.on_hello(service("drafter", "small", pass_times=PassTimes(chains={1: 1.0})))
    for mode, way in (("sd", "in turn"), ("ssd", "in parallel")):
        planned = estimates.on_new_text(mode)
        assert planned is not None
        assert planned.way == way


def speed_of(estimates: CostModel) -> float:
    """Tokens per second of speculative rounds."""
    switch = estimates.switch("ssd")
    assert switch is not None
    return switch.speculative_tok_s


def test_slow_first_rounds_are_no_price_of_plain_decoding() -> None:
    """A free run's rounds take what passes take at the present pace, and the time between them."""
    estimates = expecting(FLAT)
    slow_round = observed(speculating=False, origin="target", verify_ms=8.0, idle_ms=0.2)
    for _ in range(3):
        estimates.observe_round(replace(slow_round, continues_run=True))
    switch = estimates.switch("ssd")
    assert switch is not None
    slow = switch.plain_tok_s
    for _ in range(40):
        estimates.observe_round(replace(ROUND, is_contended=False))
    now = 1e3 / (estimates.plain_latency.of(1) + 0.2)
    assert now > 1.1 * slow
    assert switch.plain_tok_s == pytest.approx(now)


def test_a_stall_is_not_taken_for_the_price_of_speculation() -> None:
    """A kernel is made, or somebody else has the core: the next pass is as fast as before."""
    estimates = expecting(FLAT)
    for _ in range(15):
        estimates.observe_round(ROUND)
    before = speed_of(estimates)
    assert before == pytest.approx(1e3 * 3 / 6.9, rel=0.01)
    estimates.observe_round(replace(ROUND, verify_ms=200.0))
    assert speed_of(estimates) > 0.95 * before
    estimates.observe_round(replace(ROUND, idle_ms=200.0))
    assert speed_of(estimates) > 0.65 * before


def test_a_single_stall_makes_no_start_dear_for_long() -> None:
    """Nothing would be looked up for hundreds of tokens."""
    estimates = expecting(FLAT)
    estimates.observe_round(replace(PLAIN, idle_ms=3000.0))
    assert estimates.run_start_ms.value <= 4.0 * FLAT[1] + 1.0


def test_a_wait_that_recurs_is_the_price_of_speculation() -> None:
    """The drafter is behind a slow link."""
    estimates = expecting(FLAT)
    for _ in range(20):
        estimates.observe_round(replace(ROUND, origin="miss", idle_ms=40.0))
    assert speed_of(estimates) == pytest.approx(1e3 * 3 / 46.4, rel=0.01)


def service(role: Role, model: str, **fields: Any) -> Hello:
    """A service of this model says hello."""
    return Hello(
        protocol=PROTOCOL_VERSION, role=role, pid=1, model=model,
        tokenizer_fingerprint="t", vocabulary_size=9, context_length=0, max_draft_tokens=9,
        **{"compute_unit": "cpu", "backend": "mlx", **fields},
    )  # fmt: skip


def test_another_drafter_leaves_them_and_another_verifier_brings_its_own() -> None:
    """What was measured belongs to the pair; what passes take at load, to the verifier."""
    estimates = CostModel()
    verifier = service("verifier", "large", pass_times=PassTimes(chains=FLAT))
    estimates.on_hello(verifier)
    estimates.on_hello(service("drafter", "small"))
    for _ in range(30):
        estimates.verify_latency.observe(8, 10.0)
    learned = estimates.verify_latency.of(8)
    assert learned > 9.0
    estimates.on_hello(verifier)  # it was restarted
    estimates.on_hello(service("drafter", "small"))
    assert estimates.verify_latency.of(8) == learned
    estimates.on_hello(service("drafter", "other"))
    assert estimates.verify_latency.of(8) == FLAT[8]
    estimates.on_hello(service("verifier", "large", pass_times=PassTimes(chains=STEEP)))
    assert estimates.verify_latency.of(8) == STEEP[8]


def test_times_that_are_not_measured_yet_change_nothing() -> None:
    """A restarted verifier says Hello before it times passes; another one has none so far."""
    known = CostModel()
    known.on_hello(service("verifier", "large"))
    assert not known.plain_latency.is_known
    known.expect_passes(PassTimes(chains=FLAT))
    assert known.plain_latency.of(8) == FLAT[8]
    known.on_hello(service("verifier", "large"))
    assert known.plain_latency.of(8) == FLAT[8]
    known.on_hello(service("verifier", "other"))
    assert not known.plain_latency.is_known


@pytest.mark.parametrize(("draft_ms", "pays"), [(0.5, True), (30.0, False)])
def test_the_first_round_weighs_the_time_of_a_draft(draft_ms: float, *, pays: bool) -> None:
    """A drafter says at load what a token takes: none is tried that cannot pay, not even once."""
    estimates, times = CostModel(), PassTimes(chains={1: draft_ms})
    estimates.on_hello(service("drafter", "small", pass_times=times))
    assert estimates.draft_token_ms == draft_ms
    for loaded in (False, True):  # a target that has timed nothing yet is asked all the same
        hello = service("verifier", "large", pass_times=PassTimes(chains=FLAT if loaded else {}))
        estimates.on_hello(hello)
        planned = estimates.on_new_text("ssd")
        assert (planned is not None) == loaded
        switch = estimates.switch("ssd")
        assert switch is not None
        assert (switch.credit > 0.0) == (pays or not loaded)
    assert planned is not None
    assert (planned.way != "plain") == pays
    assert (planned.pass_ms[8], planned.draft_ms) == (FLAT[8], draft_ms)
    assert estimates.on_new_text("ar") is None
    for _ in range(3):
        estimates.observe_round(PLAIN)
    planner = Planner("ssd", estimates)
    assert planner.should_speculate == pays
    assert (planner.backup_length() > 0) == pays


@pytest.mark.parametrize(
    ("idle_ms", "late_ms", "way"),
    [(0.2, 0.0, "in parallel"), (0.2, 6.0, "plain"), (6.0, 0.0, "plain"), (1.4, 2.5, "plain")],
)
def test_a_schedule_counts_messages_and_late_drafts(
    idle_ms: float, late_ms: float, way: str
) -> None:
    """Once they were seen; an optimist tries drafts all the same (docs/lab/h200.md)."""
    estimates = expecting({1: 2.0, 2: 2.4, 8: 2.5})
    estimates.on_hello(service("drafter", "small", pass_times=PassTimes(chains={1: 0.7})))
    for _ in range(20):
        hit = observed(confidences=[0.7] * 3, accepted=2, verify_ms=2.4, rank=0, prepared=8)
        estimates.observe_round(replace(hit, idle_ms=idle_ms))
        estimates.observe_wait(3, 0.7 + late_ms, 2.1 + late_ms)
        missed = observed(confidences=[0.7] * 3, origin="miss", accepted=2, verify_ms=2.4)
        estimates.observe_round(replace(missed, idle_ms=1.0, prepared=8))
    planned = estimates.on_new_text("ssd")
    assert planned is not None
    assert planned.way == way
    switch = estimates.switch("ssd")
    assert switch is not None
    assert switch.credit > 0.0


def test_another_drafter_brings_the_time_of_its_own_drafts() -> None:
    """Swapped in within an answer, or with times that nobody can use."""
    estimates = CostModel()
    for model, chains, draft_ms in (
        ("a", {1: 5.0}, 5.0),
        ("b", {1: 7.0}, 7.0),
        ("c", {2: 1.0}, 0.0),
    ):
        times = PassTimes(chains=chains)
        estimates.on_hello(service("drafter", model, pass_times=times))
        assert estimates.draft_token_ms == draft_ms


def test_a_drafter_on_a_gpu_prepares_more_branches() -> None:
    """There further branches cost little; on a CPU, and on the Neural Engine, each costs time."""
    estimates, branches = CostModel(), dict[str, int]()
    for unit in ("cuda", "cuda:1", "cpu", "metal", "cpu_and_ne", ""):
        estimates.on_hello(service("drafter", "small", compute_unit=unit))
        branches[unit] = Planner("ssd", estimates).branches
    expected = {"cuda": 32, "cuda:1": 32, "cpu": 8, "metal": 32, "cpu_and_ne": 8, "": 8}
    assert branches == expected


@pytest.mark.parametrize(
    ("target", "drafter", "backend", "in_turn"),
    [
        ("cpu", "cpu", "mlx", True),
        ("cpu", "cpu", "remote", False),
        ("cuda:0", "cpu", "mlx", False),
        ("cpu", "metal", "mlx", False),
    ],
)
def test_drafting_begins_in_turn_on_cores_that_both_share(
    target: str,
    drafter: str,
    backend: str,
    in_turn: bool,  # noqa: FBT001  # pytest names it
) -> None:
    """A drafter that comes while the target decodes, too: it slows that down on the same cores."""
    estimates = CostModel()
    estimates.on_hello(service("verifier", "large", compute_unit=target))
    estimates.verify_latency.observe(1, 10.0)
    assert not estimates.drafts_in_turn
    estimates.on_hello(service("drafter", "small", compute_unit=drafter, backend=backend))
    assert estimates.drafts_in_turn is in_turn
