"""Prompt lookup as a backup: what is found, when it is offered, and what is learned from it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.terminal.explain import explanation
from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.round_observation import LONGEST_DRAFT
from orchestrator.sequence.actions import ToVerifier
from orchestrator.sequence.limits import Limits
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.planner import Planner
from protocol.decoding.logits_processor import BannedTokens
from protocol.decoding.prompt_lookup import CONFIDENCE
from protocol.messages import LogitsOptions, Sampling, Verify
from tests.support.fakes import VOCABULARY, Stack, Target, chain_of, judged, observed
from tests.support.lookups import find_continuation

LETTERS = st.integers(0, 2)
SHORT = st.lists(LETTERS, max_size=6)
TOKENS = (
    SHORT
    | st.lists(LETTERS, min_size=20, max_size=40)
    | st.builds(lambda text, end: text * 7 + end, SHORT, SHORT)
)
"""Long ones too: by themselves they would seldom be long enough for two matches, and seldom have
long ones."""
ENDLESS = Limits(60, frozenset(), 0)


@given(TOKENS, st.integers(1, 8))
def test_the_longest_match_wins_and_the_latest_of_those(tokens: list[int], count: int) -> None:
    """As the definition says, tried at every place."""
    best: tuple[list[int], float] = ([], 0.0)
    for length in sorted(CONFIDENCE):
        tail = tokens[-length:]
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == tail and len(tail) == length:
                best = tokens[end : end + count], CONFIDENCE[length]
    assert find_continuation(tokens, count) == best


@given(TOKENS, st.integers(1, 8), st.integers(0, 3))
def test_what_is_ruled_out_is_passed_over(tokens: list[int], count: int, banned: int) -> None:
    """The best match whose first token may come, up to the first that may not."""
    best: tuple[list[int], float] = ([], 0.0)
    for length in sorted(CONFIDENCE):
        tail = tokens[-length:]
        for end in range(length, len(tokens)):
            fits = tokens[end - length : end] == tail and len(tail) == length
            if fits and tokens[end] != banned:
                continuation = tokens[end : end + count]
                kept = continuation.index(banned) if banned in continuation else len(continuation)
                best = continuation[:kept], CONFIDENCE[length]
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


class Copying(Target):
    """Says the same forty tokens again and again."""

    def next(self, prefix: list[int]) -> int:
        return (len(prefix) % 40) ** 3 // 5 % VOCABULARY


def test_what_is_copied_is_looked_up_in_longer_pieces_than_drafts() -> None:
    """Nobody waits for its tokens, and long matches are soon trusted."""
    limits = Limits(400, frozenset(), 0)
    copying = Stack(mode="ssd", target=Copying(0), prompt=[0] * 40, limits=limits)
    copying.calm().assert_plain()
    assert max(copying.sequence.recorder.offered_at) >= LONGEST_DRAFT


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
    estimates = judged()
    estimates.verify_latency.expect({1: 10.0, 8: 24.0})
    estimates.observe_step(1, 1.0)
    estimates.backup_ms.observe(1.0)
    estimates.alpha.observe(0.6)
    plan = Planner("ssd", estimates)
    assert plan.backup_length() > 0
    assert plan.backup_length(chain_of([CONFIDENCE[4]] * 4)) == 0
    assert plan.backup_length(chain_of([0.05] * 4)) == plan.backup_length()


def test_while_the_drafter_rests_lookup_goes_on() -> None:
    """What did not pay is left out; what costs nothing is not."""
    estimates = judged()
    pace = estimates.switch("ssd")
    assert pace is not None
    while pace.speculating:
        pace.observe(1, 2e3, 100.0, speculating=True)
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
    for curve in (estimates.plain_latency, estimates.verify_latency):
        curve.expect({1: 10.0, 8: 80.0})
    plan = Planner("ssd", estimates)
    assert len(plan.choose_lookup(chain_of([0.75] * 4), alone=True)) == 0  # a token costs a token
    dear = Stack(mode="ssd", target=Periodic(0), prompt=[1], limits=ENDLESS, estimates=estimates)
    dear.verifier_comes()
    before = estimates.calibrations["lookup"].rate(0.75)
    for _ in range(30):
        dear.outcome_arrives()
    assert estimates.calibrations["lookup"].rate(0.75) > before + 0.1


@pytest.mark.parametrize(("rate", "used"), [(0.0, False), (1.0, True)])
def test_each_length_of_a_match_is_judged_by_what_came_of_it(rate: float, used: bool) -> None:  # noqa: FBT001  # pytest names it
    """Where matches of two tokens mislead, those of four may still be used, and the reverse."""
    estimates = judged()
    estimates.verify_latency.expect({1: 24.0, 8: 52.0})
    for _ in range(60):
        estimates.calibrations["lookup"].observe(CONFIDENCE[2], accepted=rate > 0.5)
    plan = Planner("ssd", estimates)
    assert bool(plan.choose_lookup(chain_of([CONFIDENCE[2]] * 3))) == used
    assert plan.choose_lookup(chain_of([CONFIDENCE[4]] * 3))


def test_what_recent_rounds_brought_is_what_a_row_must_earn() -> None:
    """Dear rows pay beside plain decoding, but not beside shorter lookups of the same text."""
    estimates = CostModel()
    estimates.plain_latency.expect({1: 10.0, 2: 10.5, 3: 17.0, 16: 90.0})
    plan = Planner("ssd", estimates)
    lookup = chain_of([CONFIDENCE[16]] * 15)
    assert len(plan.choose_lookup(lookup, alone=True)) > 1
    copied = observed(
        origin="lookup", speculating=False, confidences=[0.0], accepted=1, verify_ms=10.5,
        idle_ms=0.0,
    )  # fmt: skip
    for _ in range(200):
        estimates.observe_round(copied)
    assert len(plan.choose_lookup(lookup, alone=True)) == 1


def test_long_lookups_do_not_deepen_drafts() -> None:
    """What is copied says nothing of how far a drafter should look ahead."""
    estimates = CostModel()
    estimates.observe_round(observed(origin="lookup", confidences=[0.9] * 30, accepted=30))
    assert estimates.draft_length == CostModel().draft_length


@pytest.mark.parametrize(("tree_nodes", "rows"), [(0, [1, 2, 3]), (1, [1, 2, 3]), (2, [1, 2, 3])])
def test_a_lookup_is_as_long_as_it_pays(tree_nodes: int, rows: list[int]) -> None:
    """Whether trees are asked for or not."""
    estimates = CostModel()
    estimates.verify_latency.expect({1: 10.0, 8: 10.0})
    plan = Planner("ssd", estimates, tree_nodes=tree_nodes)
    assert plan.choose_lookup(chain_of([0.9] * 3)) == rows


@pytest.mark.parametrize(("rate", "restart_ms", "pays"), [(0.6, 1.0, True), (0.6, 12.0, False)])
def test_what_a_wrong_lookup_costs_counts(
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    restart_ms: float,
    pays: bool,  # noqa: FBT001  # pytest names it
) -> None:
    """Plain decoding begins anew, and on a GPU that takes as long as another token."""
    estimates = CostModel()
    estimates.plain_latency.expect({1: 10.1, 20: 12.0})
    plan = Planner("ssd", estimates)
    first = observed(speculating=False, origin="target", verify_ms=10.1, idle_ms=restart_ms)
    monkeypatch.setattr(CostModel, "acceptance_rates", lambda _, confidences, *__: confidences)
    for _ in range(50):
        estimates.observe_round(first)
    for _ in range(9):  # says nothing of it
        estimates.observe_round(replace(first, idle_ms=90.0, continues_run=True))
    assert (plan.value_of_stopping(chain_of([rate, 0.5, 0.4])) > 0.0) is pays


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
def test_a_free_run_is_ended_for_what_follows_the_token_under_way(
    monkeypatch: pytest.MonkeyPatch,
    rates: list[float],
    waiting_ms: float,
    pays: bool,  # noqa: FBT001  # pytest names it
) -> None:
    """It is being computed when the lookup is found, so that it cannot be verified any more."""
    estimates = CostModel()
    for curve in (estimates.plain_latency, estimates.verify_latency):
        curve.expect({1: 10.0, 20: 48.0})
    monkeypatch.setattr(CostModel, "acceptance_rates", lambda _, confidences, *__: confidences)
    for _ in range(50):
        estimates.idle_ms["lookup"].observe(waiting_ms)
    plan = Planner("ssd", estimates)
    assert (plan.value_of_stopping(chain_of(rates)) > 0.0) is pays
