"""Prompt lookup as a backup: what is found, when it is offered, and what is learned from it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.terminal.explain import explanation
from orchestrator.learning.cost_model import CostModel
from orchestrator.sequence.actions import ToVerifier
from orchestrator.sequence.limits import Limits
from orchestrator.sequence.lookup_value import choose_lookup, may_stop, value_of_stopping
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.planner import Planner
from protocol.decoding.logits_processor import BannedTokens
from protocol.decoding.prompt_lookup import CONFIDENCE, find_continuation
from protocol.messages import LogitsOptions, Sampling, Verify
from tests.support.fakes import Stack, Target, chain_of, observed

LETTERS = st.integers(0, 2)
TOKENS = st.lists(LETTERS, max_size=6) | st.lists(LETTERS, min_size=20, max_size=40)
"""Long ones too: by themselves they would seldom be long enough for two matches."""
ENDLESS = Limits(60, frozenset(), 0)


@given(TOKENS, st.integers(0, 8))
def test_the_longest_match_wins_and_the_latest_of_those(tokens: list[int], count: int) -> None:
    """As the definition says, tried at every place."""
    best: tuple[list[int], float] = ([], 0.0)
    for length in (2, 3, 4):
        tail = tokens[-length:]
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == tail and len(tail) == length:
                best = tokens[end : end + count], CONFIDENCE[length]
    assert find_continuation(tokens, count) == best


@given(TOKENS, st.integers(1, 8), st.integers(0, 3))
def test_what_is_ruled_out_is_passed_over(tokens: list[int], count: int, banned: int) -> None:
    """The best match whose first token may come, up to the first that may not."""
    best: tuple[list[int], float] = ([], 0.0)
    for length in (2, 3, 4):
        tail = tokens[-length:]
        for end in range(length, len(tokens)):
            fits = tokens[end - length : end] == tail and len(tail) == length
            if fits and tokens[end] != banned:
                found = tokens[end : end + count]
                kept = found.index(banned) if banned in found else len(found)
                best = found[:kept], CONFIDENCE[length]
    bans = BannedTokens(LogitsOptions(logit_bias=((banned, -100.0), (9, 99.0))))
    assert best == find_continuation(tokens, count, bans.count_allowed)


def test_a_bias_of_100_rules_out_all_the_others() -> None:
    """As OpenAI means it; a smaller one rules out nothing, and no shape neither."""
    assert (
        BannedTokens(LogitsOptions(logit_bias=((1, 100.0), (2, 100.0)))).count_allowed([2, 1, 3, 1])
        == 2
    )
    assert (
        BannedTokens(LogitsOptions(logit_bias=((1, 99.0), (2, -99.0)))).count_allowed([2, 1, 3, 1])
        == 4
    )
    assert BannedTokens(None).count_allowed([2, 1, 3, 1]) == 4


class Periodic(Target):
    """Says the same five tokens again and again."""

    def next(self, prefix: list[int]) -> int:
        return (len(prefix) * 3) % 5 if len(prefix) % 5 else 4


def stack(
    *, skill: float = 0.0, num_draft_tokens: int = 0, shape: LogitsOptions | None = None
) -> Stack:
    """The answer repeats itself; the drafter is useless, or absent."""
    return Stack(
        mode="ssd",
        target=Periodic(0),
        prompt=[1],
        limits=ENDLESS,
        skill=skill,
        num_draft_tokens=num_draft_tokens,
        sampling=Sampling(logits_options=shape),
    )


def test_without_a_drafter_what_was_said_before_is_verified() -> None:
    """Repetition is found in the answer itself, and it is said how much that brought."""
    alone = stack()
    alone.verifier_comes()
    while alone.outcome_arrives():
        pass
    alone.assert_plain()
    recorder = alone.sequence.recorder
    assert recorder.rounds < 40
    assert recorder.fallbacks["lookup"] == recorder.by_origin["lookup"].rounds > 3
    assert alone.origins.count("lookup") == recorder.accepted > 20
    assert "looked up in prompt and answer" in explanation("ssd", recorder.summarise())


def test_a_banned_token_is_not_looked_up() -> None:
    """What was said before may hold a token that this request has banned."""
    alone = stack(shape=LogitsOptions(logit_bias=((3, -100.0),)))
    alone.verifier_comes()
    while alone.outcome_arrives():
        pass
    alone.assert_plain()  # this target knows no bias
    chains = [a.message.nodes for a in alone.actions if isinstance(a, ToVerifier)
              and isinstance(a.message, Verify)]  # fmt: skip
    assert any(len(chain) > 1 for chain in chains)
    assert all(3 not in chain[1:] for chain in chains)


def test_after_a_miss_a_lookup_costs_the_drafter_nothing() -> None:
    """A drafter that is always wrong is passed over, and prepares for what was looked up."""
    beside = stack()
    beside.verifier_comes()
    beside.drafter_comes()
    prepared = set[int]()
    for _ in range(200):
        if beside.sequence.current.origin == "lookup" and beside.sequence.current.speculating:
            prepared.add(beside.sequence.round)
        beside.calm_round()
    assert beside.sequence.phase is Phase.FINISHED
    beside.assert_plain()
    assert beside.sequence.recorder.fallbacks["lookup"] > 3
    assert beside.origins.count("lookup") > 20
    assert prepared  # not only while the drafter rested


def test_a_draft_that_is_waited_for_must_be_better_than_what_was_found() -> None:
    """What is looked up costs no wait: unless it is unlikely, the target goes on with it."""
    estimates = CostModel()
    for tokens in range(1, 9):
        estimates.verify_latency.observe(tokens, 8.0 + 2.0 * tokens)
    estimates.observe_step(1, 8, 1.0)
    estimates.backup_ms.observe(1.0)
    estimates.acceptance["hit"].observe(0.6)
    plan = Planner("ssd", estimates)
    assert plan.backup_length() > 0
    assert plan.backup_length(chain_of([CONFIDENCE[4]] * 4)) == 0
    assert plan.backup_length(chain_of([0.05] * 4)) == plan.backup_length()


def test_while_the_drafter_rests_lookup_goes_on() -> None:
    """What did not pay is left out; what costs nothing is not."""
    estimates = CostModel()
    pace = estimates.switches["ssd"]
    while pace.speculating:
        pace.observe(1, 10.0, accepted=0)
    beside = Stack(mode="ssd", target=Periodic(0), prompt=[1], limits=ENDLESS, estimates=estimates)
    beside.calm().assert_plain()
    assert beside.origins.count("lookup") > 20
    assert beside.sequence.recorder.hits + beside.sequence.recorder.misses == 0


def test_what_is_fixed_by_hand_is_not_changed() -> None:
    """A drafter drafts as many tokens as it is told, and nothing is looked up; without one, lookups
    are as long."""
    fixed = stack(num_draft_tokens=3)
    fixed.drafter_comes()
    fixed.calm().assert_plain()
    assert "lookup" not in fixed.origins
    alone = stack(num_draft_tokens=3)
    alone.calm().assert_plain()
    assert alone.origins.count("lookup") > 20
    assert max(alone.sequence.recorder.offered_at) == 2


def test_a_lookup_that_was_not_verified_teaches_too() -> None:
    """The outcome tells for nothing whether its first token was right."""
    estimates = CostModel()
    for tokens in range(1, 9):
        estimates.plain_latency.observe(tokens, 10.0 * tokens)
        estimates.verify_latency.observe(tokens, 10.0 * tokens)
    plan = Planner("ssd", estimates)
    assert len(choose_lookup(plan, chain_of([0.75] * 4), alone=True)) == 0  # a token costs a token
    dear = Stack(mode="ssd", target=Periodic(0), prompt=[1], limits=ENDLESS, estimates=estimates)
    dear.verifier_comes()
    before = estimates.calibrations["lookup"].rate(0.75)
    for _ in range(30):
        dear.outcome_arrives()
    assert estimates.calibrations["lookup"].rate(0.75) > before + 0.1


@pytest.mark.parametrize(("rate", "used"), [(0.0, False), (1.0, True)])
def test_each_length_of_a_match_is_judged_by_what_came_of_it(rate: float, used: bool) -> None:  # noqa: FBT001  # pytest names it
    """Where matches of two tokens mislead, those of four may still be used, and the reverse."""
    estimates = CostModel()
    for tokens in range(1, 9):
        estimates.verify_latency.observe(tokens, 20.0 + 4.0 * tokens)
    for _ in range(60):
        estimates.calibrations["lookup"].observe(CONFIDENCE[2], accepted=rate > 0.5)
    plan = Planner("ssd", estimates)
    assert bool(choose_lookup(plan, chain_of([CONFIDENCE[2]] * 3))) == used
    assert choose_lookup(plan, chain_of([CONFIDENCE[4]] * 3))


@pytest.mark.parametrize(
    ("tree_nodes", "rows"), [(0, [1, 2, 3]), (1, [1, 2, 3]), (2, [1, 2]), (None, [1, 2, 3])]
)
def test_without_trees_a_lookup_is_as_long_as_it_pays(
    tree_nodes: int | None, rows: list[int]
) -> None:
    """A size by hand is that of trees."""
    estimates = CostModel()
    for tokens in range(1, 9):
        estimates.verify_latency.observe(tokens, 10.0)
        estimates.tree_latency.observe(tokens, 10.0)
    plan = Planner("ssd", estimates, tree_nodes=tree_nodes)
    assert choose_lookup(plan, chain_of([0.9] * 3)) == rows


@pytest.mark.parametrize(("rate", "restart_ms", "pays"), [(0.6, 1.0, True), (0.6, 12.0, False)])
def test_what_a_wrong_lookup_costs_counts(
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    restart_ms: float,
    pays: bool,  # noqa: FBT001  # pytest names it
) -> None:
    """Plain decoding begins anew, and on a GPU that takes as long as another token."""
    estimates = CostModel()
    for tokens in range(1, 20):
        estimates.plain_latency.observe(tokens, 10.0 + 0.1 * tokens)
    plan = Planner("ssd", estimates)
    first = observed(speculating=False, origin="target", verify_ms=10.1, idle_ms=restart_ms)
    monkeypatch.setattr(CostModel, "acceptance_rates", lambda _, confidences, *__: confidences)
    for _ in range(50):
        estimates.observe_round(first)
    for _ in range(9):  # says nothing of it
        estimates.observe_round(replace(first, idle_ms=90.0, continues_run=True))
    assert (value_of_stopping(plan, chain_of([rate, 0.5, 0.4])) > 0.0) is pays


@pytest.mark.parametrize(
    ("rates", "waiting_ms", "pays"),
    [
        ([0.9, 0.9, 0.9], 1.0, True),
        ([0.9, 0.9, 0.9], 12.0, False),  # the verifier would wait for longer than that saves
        ([0.05, 0.9, 0.9], 1.0, False),  # the token under way will be another one
        ([0.9], 0.0, False),  # nothing follows it
        ([0.9, 0.02, 0.02], 1.0, False),
        ([], 0.0, False),
    ],
)
@pytest.mark.parametrize("streams", [1, 4])
def test_a_free_run_is_ended_for_what_follows_the_token_under_way(
    monkeypatch: pytest.MonkeyPatch,
    rates: list[float],
    waiting_ms: float,
    pays: bool,  # noqa: FBT001  # pytest names it
    streams: int,
) -> None:
    """It is being computed when the lookup is found, so that it cannot be verified any more."""
    estimates = CostModel()
    for tokens in range(1, 20):
        for curve in (estimates.plain_latency, estimates.verify_latency):
            curve.observe(tokens, 8.0 + 2.0 * tokens)
    monkeypatch.setattr(CostModel, "acceptance_rates", lambda _, confidences, *__: confidences)
    for _ in range(50):
        estimates.idle_ms["lookup"].observe(waiting_ms)
    estimates.batch.streams = streams
    plan = Planner("ssd", estimates)
    assert (value_of_stopping(plan, chain_of(rates)) > 0.0) is pays


def in_company(
    streams: int, *, waiting_ms: float, late_ms: float = 0.0, continues: bool = False
) -> Planner:
    """So many requests run free together, in passes of 20 ms; lookups had the target wait."""
    plan = Planner("ssd", CostModel())
    known = plan.estimates
    for rows in range(1, 40):
        known.verify_latency.observe(rows, 20.0)
        known.plain_latency.observe(rows, 20.0)
    for _ in range(20):
        known.idle_ms["lookup"].observe(waiting_ms)
    known.batch.streams = streams
    told = {"sequences": streams, "all_tokens": streams, "verify_ms": 20.0, "idle_ms": 0.0}
    for _ in range(40):
        since = {"since_last_ms": 20.0 + late_ms, "continues_run": continues}
        known.observe_round(observed(origin="target", speculating=False, **since, **told))
    return plan


@pytest.mark.parametrize(("streams", "pays"), [(1, True), (2, True), (8, False)])
def test_a_wait_is_everybodys(streams: int, *, pays: bool) -> None:
    """A millisecond of the target's is worth what all of them could have had in it."""
    plan = in_company(streams, waiting_ms=6.0)
    assert (value_of_stopping(plan, chain_of([0.9, 0.8, 0.7])) > 0.0) is pays
    found = chain_of([0.9, 0.8, 0.7])
    assert bool(choose_lookup(plan, found, alone=True)) is pays
    assert choose_lookup(plan, found)  # with a drafter at work no pass begins ahead


def test_another_lookup_costs_one_pass_that_is_missed_and_the_first_one_two() -> None:
    """Who is not in a free run has left it already."""
    plan = in_company(4, waiting_ms=0.0, late_ms=20.0)
    # They bring 1.5 tokens, and 1.4 behind the first one; .85 passes are missed at a time.
    short, long = chain_of([0.9, 0.4, 0.2]), chain_of([0.9, 0.8, 0.7])
    assert choose_lookup(plan, short, alone=True)
    assert value_of_stopping(plan, long) < 0.0 < value_of_stopping(plan, chain_of([0.9] * 6))
    late = in_company(4, waiting_ms=0.0, late_ms=40.0)
    assert not choose_lookup(late, short, alone=True)


def test_a_prompt_between_two_passes_is_none_of_them() -> None:
    """What a request waited for another one's prompt says nothing of the next lookup."""
    plan = in_company(4, waiting_ms=0.0, late_ms=16.0)
    missed = plan.estimates.batch.missed_passes
    assert missed == pytest.approx(0.8, abs=0.15)
    seen = observed(sequences=4, verify_ms=20.0, idle_ms=0.0, since_last_ms=220.0)
    plan.estimates.observe_round(seen)
    assert plan.estimates.batch.missed_passes == missed


def test_what_was_missed_once_is_forgotten() -> None:
    """Who runs free misses nothing, and would never learn that things have changed."""
    plan = in_company(4, waiting_ms=0.0, late_ms=40.0)
    found = chain_of([0.9, 0.8, 0.7])
    assert value_of_stopping(plan, found) < 0.0
    told = {"sequences": 4, "all_tokens": 4, "verify_ms": 20.0, "idle_ms": 0.0}
    for _ in range(3000):
        seen = observed(since_last_ms=20.0, continues_run=True, **told)
        plan.estimates.batch.observe(seen, 20.0)
    assert value_of_stopping(plan, found) > 0.0


@pytest.mark.parametrize(
    ("missed_ms", "continues", "pays"),
    [(0.0, False, True), (40.0, False, False), (40.0, True, True)],
)
def test_others_go_on_without_who_leaves_its_run(
    missed_ms: float, *, continues: bool, pays: bool
) -> None:
    """Each pass of theirs that a lookup costs is a token; who is not asked for cannot be late."""
    plan = in_company(4, waiting_ms=0.0, late_ms=missed_ms, continues=continues)
    assert (value_of_stopping(plan, chain_of([0.9, 0.8, 0.7])) > 0.0) is pays


@pytest.mark.parametrize(("lookup_ms", "pays"), [(20.0, True), (45.0, False)])
def test_a_pass_that_takes_longer_is_everybodys(lookup_ms: float, *, pays: bool) -> None:
    """One that was asked for does not begin beforehand, whatever its rows are known to cost."""
    plan = in_company(4, waiting_ms=0.0)
    told = {"sequences": 4, "verify_ms": lookup_ms, "idle_ms": 0.0}
    for rows in range(6, 16):
        seen = observed(origin="lookup", speculating=False, all_tokens=rows, **told)
        plan.estimates.batch.observe(seen, 20.0)
    found = chain_of([0.9, 0.8, 0.7])
    assert (value_of_stopping(plan, found) > 0.0) is pays
    assert bool(choose_lookup(plan, found, alone=True)) is pays
    free = {"sequences": 4, "all_tokens": 4, "verify_ms": 20.0, "idle_ms": 0.0}
    seen = observed(continues_run=True, since_last_ms=20.0, **free)
    for _ in range(3000):
        plan.estimates.batch.observe(seen, 20.0)
    assert plan.estimates.batch.other_tokens == 3
    assert value_of_stopping(plan, found) > 0.0  # it is forgotten where nobody tries it


@pytest.mark.parametrize("rows_ms", [0.0, 3.0, 6.0])
def test_the_time_of_more_rows_is_counted_once(rows_ms: float) -> None:
    """Whether it is known of the rows or of passes with a lookup: the larger of both counts."""
    plan = in_company(4, waiting_ms=0.0)
    for rows in range(5, 16):
        for _ in range(60):
            plan.estimates.plain_latency.observe(rows, 20.0 + rows_ms)
    found = chain_of([0.9, 0.8, 0.7])
    unknown = value_of_stopping(plan, found)
    seen = observed(
        origin="lookup", speculating=False, sequences=4, all_tokens=4, verify_ms=26.0, idle_ms=0.0
    )
    for _ in range(200):
        plan.estimates.batch.observe(seen, 20.0)
    assert plan.estimates.batch.other_tokens == 3
    # Three tenths of a pass, in which four requests have a token each; before, what rows take.
    right = plan.estimates.acceptance_rates([0.9], [0], "lookup")[0]
    charged = unknown - value_of_stopping(plan, found)
    assert charged == pytest.approx(4 * (0.3 - right * rows_ms / 20.0), abs=0.12)


def test_nothing_is_looked_up_where_no_lookup_can_pay() -> None:
    """The search takes the orchestrator's time, of which every token of 32 requests has some."""
    plan = in_company(32, waiting_ms=6.0)
    assert not may_stop(plan)
    assert value_of_stopping(plan, chain_of([0.99] * plan.depth)) < 0.0
    assert may_stop(in_company(2, waiting_ms=6.0))
    assert may_stop(in_company(1, waiting_ms=60.0))
