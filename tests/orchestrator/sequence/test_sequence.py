"""The state machine of a request, driven by a fake target and a fake drafter."""

from collections.abc import Callable
from itertools import product
from math import ceil
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.learning.cost_model import CostModel
from orchestrator.sequence.free_run import MOST_GRANTED
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.sequence import Emit, Finish, Limits, ToDrafter, ToVerifier
from protocol.messages import (
    CloseSequence,
    DraftNow,
    DraftTree,
    Extend,
    Mode,
    OpenSequence,
    Prepare,
    Revoke,
    Verify,
)
from tests.support.fakes import VOCABULARY, Stack, Target, describe, judged, started

MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")
ENDLESS = Limits(10**6, frozenset({0}), 0)
"""Ends only at a stop token."""


PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)
LIMITS = st.builds(
    Limits,
    st.integers(1, 40),
    st.frozensets(st.integers(0, VOCABULARY - 1), max_size=1),
    st.one_of(st.just(0), st.integers(7, 40)),
)
PLANS = st.fixed_dictionaries(
    {"mode": st.sampled_from(MODES), "prompt": PROMPTS, "limits": LIMITS},
    optional={
        "num_draft_tokens": st.integers(0, 6),
        "budget": st.integers(0, 12),
        "skill": st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]),
        "max_draft": st.sampled_from([0, 1, 3, 64]),
        "drafter_context": st.sampled_from([0, 16, 30]),
        "seed": st.integers(0, 2**32),
        "trees": st.booleans(),
        "tree_nodes": st.sampled_from([0, 1, 2, 4, 9]),
        "row_ms": st.sampled_from([0.01, 1.0]),
    },
)


@settings(max_examples=250)
@given(PLANS, st.integers(0, 255), st.integers(0, 150), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_the_answer_is_that_of_plain_decoding(
    plan: dict[str, Any], salt: int, chaos: int, patience: float
) -> None:
    """Whoever dies, whatever is late, stale, repeated or lost: the tokens are the target's own."""
    stack = Stack(target=Target(salt), **plan)
    stack.chaos(chaos)
    stack.calm(patience).assert_plain()
    assert {"target", "hit", "miss", "lookup", "branch"} >= set(stack.origins)


@given(PLANS, st.integers(0, 255), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 99))
def test_stale_and_repeated_messages_change_nothing(
    plan: dict[str, Any], salt: int, order: list[int], seed: int
) -> None:
    """What was delivered before may come again at any time: no action or estimate differs."""
    undisturbed, disturbed = (started(target=Target(salt), **plan) for _ in range(2))
    chance = Random(seed)  # noqa: S311  # no secret depends on it
    for event in order:
        for stack in (undisturbed, disturbed):
            _EVENTS[event](stack)
        before = len(disturbed.actions)
        for _ in range(3):
            old_news(disturbed, chance)
        assert before == len(disturbed.actions)
        learned = [describe(s.estimates) for s in (undisturbed, disturbed)]
        assert learned[0] == learned[1]
    undisturbed.calm().assert_plain()
    disturbed.calm().assert_plain()
    assert undisturbed.actions == disturbed.actions


_EVENTS: tuple[Callable[[Stack], object], ...] = (
    Stack.drafter_works,
    Stack.tree_arrives,
    Stack.outcome_arrives,
    Stack.calm_round,
)


@pytest.mark.parametrize("wrong", ["no parent", "alike", "one too many", "too wide", "unknown row"])
def test_a_malformed_tree_is_refused_and_the_request_goes_on(wrong: str) -> None:
    """Whatever a drafter sends in place of a tree: dropped, counted, and not a token differs."""
    limits = Limits(30, frozenset(), 0)
    stack = started(mode="ssd", target=Target(3), prompt=[1], limits=limits, trees=True,
                    tree_nodes=6, skill=0.6)  # fmt: skip
    for _ in range(12):
        while stack.drafter_works():
            sent = stack.wire.pop()
            stack.do(stack.sequence.on_tree(_spoil(sent, wrong), stack.now))
        if not stack.outcome_arrives():
            stack.patience_ends()
    assert stack.sequence.recorder.stale_trees > 0
    assert stack.sequence.recorder.tree_rounds == 0
    stack.calm().assert_plain()


def _spoil(tree: DraftTree, wrong: str) -> DraftTree:
    count = len(tree.tokens)
    match wrong:
        case "no parent":
            changes: dict[str, Any] = {"parents": [count + 99] * count}
        case "alike":
            changes = {"parents": [0] * count, "tokens": [1] * count}
        case "one too many":
            changes = {"parents": [*tree.parents, 0]}
        case "too wide":
            changes = {
                name: getattr(tree, name) * 200 for name in ("tokens", "confidences", "parents")
            }
        case _:
            changes = {"outcomes": [(row + 99, bonus) for row, bonus in tree.outcomes]}
    return replace(tree, **changes)


def old_news(stack: Stack, chance: Random) -> None:
    """Something that was delivered before arrives again."""
    trees = [tree for tree in stack.past if tree not in stack.wire]
    if trees:
        stack.do(stack.sequence.on_tree(chance.choice(trees), stack.now))
    if stack.past_outcomes:
        stack.do(stack.sequence.decide(chance.choice(stack.past_outcomes), stack.now))
        stack.do(stack.sequence.record(stack.now))


@settings(max_examples=60)
@given(PLANS, st.integers(0, 255), st.integers(0, 150), st.sampled_from([0.5, 1.0]))
def test_statistics_add_up(plan: dict[str, Any], salt: int, chaos: int, patience: float) -> None:
    """Counts agree with each other and with the answer, whatever happened."""
    stack = Stack(target=Target(salt), **plan)
    stack.chaos(chaos)
    stack.calm(patience)
    recorder = stack.sequence.recorder
    assert len(stack.emitted) == recorder.emitted
    assert recorder.accepted <= recorder.drafted
    # Each round adds its accepted tokens and a bonus token, which the last may lose.
    assert recorder.emitted <= recorder.accepted + recorder.rounds <= recorder.emitted + 1
    assert recorder.accepted == sum(origin != "target" for origin in stack.origins)
    assert recorder.hits + recorder.misses <= max(0, recorder.rounds - 1)
    assert recorder.accepted == sum(recorder.accepted_at.values())
    if recorder.tree_rounds == 0:
        assert recorder.drafted == sum(recorder.offered_at.values())
    assert recorder.branch_tokens == stack.origins.count("branch")
    assert plan["mode"] == "ssd" or recorder.hits + recorder.misses == 0
    assert plan["mode"] != "ar" or recorder.drafted == 0
    assert 1 <= recorder.rounds <= len(stack.past_outcomes)


SALTS = [salt for salt in range(120) if 25 <= len(Target(salt).plain([1, 2], ENDLESS)[0]) <= 90][:6]


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
def test_a_perfect_drafter_always_hits(salt: int, num_draft_tokens: int) -> None:
    """With a drafter that is always right and in time, every round after the first is a hit."""
    stack = started(
        mode="ssd",
        target=Target(salt),
        prompt=[1, 2],
        limits=ENDLESS,
        num_draft_tokens=num_draft_tokens,
    ).calm()
    stack.assert_plain()
    recorder = stack.sequence.recorder
    assert recorder.hits > 0
    assert (recorder.rounds - 1, 0) == (recorder.hits, recorder.misses)
    assert "miss" not in stack.origins
    if num_draft_tokens:
        assert 1 + ceil(len(stack.truth) / (num_draft_tokens + 1)) == recorder.rounds


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_perfect_drafter_is_always_accepted(salt: int, mode: Mode) -> None:
    """All tokens of a drafter that is always right stand, up to the one that ends the answer."""
    stack = started(
        mode=mode, target=Target(salt), prompt=[1, 2], limits=ENDLESS, num_draft_tokens=3
    )
    stack.calm().assert_plain()
    outcomes = stack.past_outcomes
    assert [0, *[3 for _ in outcomes[1:]]] == [outcome.accepted for outcome in outcomes]


@pytest.mark.parametrize("salt", SALTS)
def test_a_hopeless_drafter_is_never_accepted(salt: int) -> None:
    """A drafter that is always wrong brings nothing; at most something can be looked up."""
    stack = started(mode="ssd", target=Target(salt), prompt=[1, 2], limits=ENDLESS, skill=0.0)
    stack.calm().assert_plain()
    recorder = stack.sequence.recorder
    assert recorder.accepted == stack.origins.count("lookup")
    assert len(stack.truth) + 1 == recorder.rounds + recorder.accepted


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("skill", [0.5, 0.9])
@pytest.mark.parametrize("patience", [0.3, 1.0])
def test_every_later_round_is_a_hit_or_a_miss(salt: int, skill: float, patience: float) -> None:
    """With a drafter that stays, hits and misses are all rounds but the first."""
    stack = started(
        mode="ssd",
        target=Target(salt),
        prompt=[1, 2],
        limits=ENDLESS,
        num_draft_tokens=3,
        skill=skill,
        seed=salt,
    ).calm(patience)
    recorder = stack.sequence.recorder
    assert recorder.hits > 0
    assert recorder.rounds - 1 == recorder.hits + recorder.misses
    assert recorder.fallbacks.total() == recorder.misses


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_trees_of_other_rounds_are_dropped(mode: Mode) -> None:
    """A stale tree neither fills nor blocks the place of the one that the round waits for."""
    stack = started(
        mode=mode, target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS, num_draft_tokens=3
    )
    while stack.sequence.phase is not Phase.FINISHED:
        for stale in [tree for tree in stack.past if tree.round != stack.sequence.round]:
            stack.do(stack.sequence.on_tree(stale, stack.now))
        assert stack.sequence.current.cache.depth == 0
        while stack.drafter_works():
            stack.tree_arrives()
        stack.outcome_arrives()
    stack.assert_plain()
    assert [0, *[3 for _ in stack.past_outcomes[1:]]] == [o.accepted for o in stack.past_outcomes]


def test_trees_that_are_dropped_are_counted() -> None:
    """Of another round, or twice."""
    stack = started(
        mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS, num_draft_tokens=3
    )
    assert stack.drafter_works()
    stack.tree_arrives()
    assert stack.sequence.recorder.stale_trees == 0
    stack.tree_comes_again()
    assert stack.sequence.recorder.stale_trees == 1
    assert stack.outcome_arrives()
    stack.tree_comes_again()
    assert stack.sequence.recorder.summarise().stale_trees == 2


def test_what_was_not_prepared_in_time_is_a_miss() -> None:
    """An outcome that arrives before any depth of the tree is a miss, however good the drafter."""
    stack = started(
        mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS, num_draft_tokens=3
    )
    stack.calm(patience=0.0).assert_plain()
    recorder = stack.sequence.recorder
    assert recorder.hits == 0
    assert recorder.rounds - 1 == recorder.misses


def verifications(stack: Stack) -> list[Verify]:
    messages = [action.message for action in stack.actions if isinstance(action, ToVerifier)]
    return [message for message in messages if isinstance(message, Verify)]


def short_chains() -> CostModel:
    """At these costs one draft token is verified, never two."""
    estimates = judged()
    estimates.verify_latency.expect({1: 11.0, 2: 12.0, 3: 1e3})
    return estimates


@pytest.mark.parametrize("salt", SALTS)
def test_the_unverified_rest_of_a_draft_is_kept(salt: int) -> None:
    """A branch of 4 tokens, verified one by one, hits twice although the drafter sleeps."""
    stack = started(
        mode="ssd",
        target=Target(salt),
        prompt=[1, 2],
        limits=ENDLESS,
        estimates=short_chains(),
    )
    while stack.drafter_works():
        stack.tree_arrives()
    for hits in (1, 2, 2):
        stack.outcome_arrives()
        assert hits == stack.sequence.recorder.hits
    chains = [len(m.nodes) for m in verifications(stack)]
    assert chains[:3] == [1, 2, 2]
    assert stack.sequence.recorder.misses == 1
    stack.calm().assert_plain()


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("skill", [0.5, 0.8])
def test_a_rest_is_used_only_behind_its_first_token(salt: int, skill: float) -> None:
    """With a drafter that errs, a kept rest is found exactly if the target says its first token."""
    stack = started(
        mode="ssd",
        target=Target(salt),
        prompt=[1, 2],
        limits=ENDLESS,
        skill=skill,
        estimates=short_chains(),
        seed=salt,
    )
    kept = 0
    while stack.sequence.phase is not Phase.FINISHED:
        stack.calm_round()
        current = stack.sequence.current
        bonuses = [b for b in range(VOCABULARY) if current.cache.draft(len(current.draft), b)]
        if current.cache.depth == 0 and bonuses:
            kept += 1
            assert stack.sequence.recorder.hits > 0
            assert len(bonuses) == 1
    stack.assert_plain()
    assert kept > 0


@pytest.mark.parametrize("mode", ["ar", "sd"])
def test_only_speculative_speculative_decoding_keeps_a_rest(mode: Mode) -> None:
    """Sequential speculative decoding drafts anew, and counts neither hits nor misses."""
    stack = started(
        mode=mode,
        target=Target(SALTS[0]),
        prompt=[1, 2],
        limits=ENDLESS,
        estimates=short_chains(),
    ).calm()
    stack.assert_plain()
    assert (stack.sequence.recorder.hits, stack.sequence.recorder.misses) == (0, 0)


TALK = [
    ("ar", 0, set[type]()),
    ("ar", 3, set[type]()),
    ("sd", 0, {OpenSequence, DraftNow, CloseSequence}),
    ("sd", 3, {OpenSequence, DraftNow, CloseSequence}),
    ("ssd", 0, {OpenSequence, Prepare, DraftNow, CloseSequence}),
    ("ssd", 3, {OpenSequence, Prepare, DraftNow, CloseSequence}),
]


@pytest.mark.parametrize(("mode", "num_draft_tokens", "expected"), TALK)
def test_each_mode_talks_only_as_it_should(
    mode: Mode, num_draft_tokens: int, expected: set[type]
) -> None:
    """Plain decoding never bothers the drafter; it prepares, and is waited for, only as planned."""
    stack = started(
        mode=mode,
        target=Target(SALTS[0]),
        prompt=[1, 2],
        limits=ENDLESS,
        skill=0.6,
        num_draft_tokens=num_draft_tokens,
    ).calm()
    assert {type(message) for message in stack.to_drafter()} == expected


def test_after_a_miss_the_planned_backup_follows() -> None:
    """With a lookahead the target waits for a draft after a miss; without, if that pays."""
    for num_draft_tokens, token_ms in [(3, 0.0), (0, 1e-3), (0, 1e3)]:
        stack = started(
            mode="ssd",
            target=Target(SALTS[0]),
            prompt=[1, 2],
            limits=ENDLESS,
            skill=0.7,
            num_draft_tokens=num_draft_tokens,
            draft_ms=token_ms,
        ).calm(patience=0.6)
        stack.assert_plain()
        recorder = stack.sequence.recorder
        assert recorder.fallbacks.keys() <= {"draft", "plain", "lookup"}
        # Behind plain rounds that measure, nothing was prepared: no miss, and yet no hit.
        assert 0 <= recorder.fallbacks.total() - recorder.misses <= 1
        assert ("draft" in recorder.fallbacks) is (token_ms < 1e3)
        assert ("miss" in stack.origins) is (token_ms < 1e3)
        assert not (num_draft_tokens and "plain" in recorder.fallbacks)
        assert "hit" in stack.origins


@pytest.mark.parametrize(
    ("why", "num_draft_tokens", "waits"),
    [
        ("", 0, True),
        ("filling", 0, False),
        ("late", 0, False),
        ("filling", 3, True),  # fixed by hand: drafts are wanted whatever they cost
        ("late", 3, True),
    ],
)
def test_a_silent_drafter_is_not_waited_for(
    why: str, num_draft_tokens: int, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    """It may be computing the prompt, or compiling: the target goes on, and it is asked as ever.

    But now and then: it may be one that only drafts when it is waited for.
    """
    stack = started(
        mode="ssd", target=Target(SALTS[1]), prompt=[1, 2], limits=ENDLESS, skill=0.7,
        draft_ms=1e-3, num_draft_tokens=num_draft_tokens,
    )  # fmt: skip
    sequence = stack.sequence
    if why == "filling":
        sequence._drafter_sync.is_filling = True
        monkeypatch.setattr(sequence, "on_drafter_filled", lambda: None)
    sequence.planner.estimates.drafter_is_late = why == "late"
    stack.calm(patience=0.6)
    stack.assert_plain()
    assert any(isinstance(message, Prepare) for message in stack.to_drafter())
    waited = [
        message.round
        for message in stack.to_drafter()
        if isinstance(message, DraftNow) and message.count
    ]
    assert any(number % 16 != 1 for number in waited) is waits
    assert ("draft" in sequence.recorder.fallbacks) is bool(waited) is (why != "filling" or waits)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_answers_end_where_plain_decoding_ends(mode: Mode, num_draft_tokens: int) -> None:
    """Stop tokens, max_tokens and the context length cut every mode's answer at the same token."""
    endings = set()
    for salt, tokens, context in product((1, 2, 3), (1, 2, 3, 5, 6, 11), (0, 3, 6, 9)):
        limits = Limits(tokens, frozenset({3}), context)
        stack = started(
            mode=mode,
            target=Target(salt),
            prompt=[4, 5],
            limits=limits,
            num_draft_tokens=num_draft_tokens,
        )
        stack.calm().assert_plain()
        endings.add(stack.ending)
    assert endings == {"stop", "length", "context"}


def test_a_stop_token_inside_a_chain_drops_the_rest() -> None:
    """Accepted tokens behind a stop token are not part of the answer, nor counted as accepted."""
    target = next(t for t in map(Target, range(250)) if len(t.plain([1, 2], ENDLESS)[0]) == 3)
    stack = started(mode="sd", target=target, prompt=[1, 2], limits=ENDLESS, num_draft_tokens=6)
    stack.calm().assert_plain()
    assert stack.past_outcomes[-1].accepted == 6
    recorder = stack.sequence.recorder
    assert (recorder.rounds, recorder.accepted, recorder.emitted) == (2, 2, 3)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_the_verifier_is_served_first(mode: Mode) -> None:
    """An outcome's first action is the next Verify or the call for a draft; text is last."""
    stack = started(
        mode=mode,
        target=Target(SALTS[1]),
        prompt=[1, 2],
        limits=ENDLESS,
        skill=0.8,
        num_draft_tokens=3 if mode == "sd" else 0,
        draft_ms=1e3,
    )
    while stack.sequence.phase is not Phase.FINISHED:
        while stack.drafter_works():
            stack.tree_arrives()
        before = len(stack.actions)
        assert stack.outcome_arrives()
        answered = stack.actions[before:]
        if isinstance(answered[-1], Finish):
            return
        first = answered[0]
        last = stack.past_outcomes[-1]
        if last.goes_on:
            continue  # nobody waits
        assert isinstance(first, ToVerifier if mode == "ssd" else ToDrafter)
        assert isinstance(first.message, Verify if mode == "ssd" else DraftNow)
        assert isinstance(answered[-1], Emit)
    raise AssertionError("the run ends with Finish")


def test_without_a_verifier_a_request_waits() -> None:
    """A request that meets no verifier does nothing until one comes, and then starts."""
    stack = Stack(mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS)
    stack.drafter_comes()
    assert stack.sequence.phase is Phase.STRANDED
    assert [OpenSequence] == [type(message) for message in stack.to_drafter()]
    stack.calm().assert_plain()
    assert stack.sequence.recorder.hits > 0


def test_a_restarted_verifier_gets_the_committed_tokens() -> None:
    """After a death the sequence opens with what was committed and verifies the pending token."""
    stack = started(
        mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS, num_draft_tokens=2
    )
    for _ in range(3):
        while stack.drafter_works():
            stack.tree_arrives()
        stack.outcome_arrives()
    stack.verifier_dies()
    assert stack.sequence.phase is Phase.STRANDED
    before = len(stack.actions)
    stack.verifier_comes()
    opened, verify = [a.message for a in stack.actions[before:] if isinstance(a, ToVerifier)]
    assert isinstance(opened, OpenSequence)
    assert isinstance(verify, Verify)
    tokens = stack.sequence.tokens
    assert (tokens[:-1], tokens[-1:]) == (opened.tokens, verify.nodes)
    stack.calm().assert_plain()


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_without_a_drafter_decoding_is_plain(mode: Mode) -> None:
    """A request that has no drafter decodes one token per round, but for what can be looked up,
    and says why."""
    stack = Stack(mode=mode, target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS)
    stack.verifier_comes()
    stack.calm().assert_plain()
    recorder = stack.sequence.recorder
    assert len(stack.truth) + 1 == recorder.rounds + recorder.accepted
    assert {"no_drafter", "lookup"} == recorder.fallbacks.keys()
    assert recorder.fallbacks.total() == recorder.rounds - 1


def test_a_drafter_that_comes_late_still_helps() -> None:
    """A drafter that joins in the middle is told all, and asked at once for the running round."""
    stack = Stack(mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS)
    stack.verifier_comes()
    for _ in range(5):
        stack.outcome_arrives()
    stack.drafter_comes()
    opened, prepare = stack.to_drafter()
    assert isinstance(opened, OpenSequence)
    assert stack.sequence.tokens[:-1] == opened.tokens
    assert isinstance(prepare, Prepare)
    assert (len(opened.tokens), []) == (prepare.base, prepare.tokens)
    stack.calm().assert_plain()
    recorder = stack.sequence.recorder
    unasked = sum(outcome.goes_on for outcome in stack.past_outcomes)
    assert unasked >= 4
    # All but the first round, and what follows tokens that came unasked.
    assert recorder.rounds - unasked - 3 <= recorder.hits


@pytest.mark.parametrize("event", ["late", "died"])
def test_the_target_does_not_wait_for_ever(event: str) -> None:
    """A draft that is late, or never comes, is verified as far as it has come."""
    stack = started(
        mode="sd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS, num_draft_tokens=4
    )
    stack.outcome_arrives()
    assert stack.sequence.phase is Phase.DRAFTING
    for _ in range(2):
        stack.drafter_works()
        stack.tree_arrives()
    if event == "late":
        stack.patience_ends()
    else:
        stack.drafter_dies()
    verify = [a.message for a in stack.actions if isinstance(a, ToVerifier)][-1]
    assert isinstance(verify, Verify)
    assert [*stack.prompt, *stack.truth][2:5] == verify.nodes
    reason = "late" if event == "late" else "drafter_died"
    assert {reason: 1} == dict(stack.sequence.recorder.fallbacks)
    stack.calm().assert_plain()


def test_near_its_context_a_drafter_is_left_alone() -> None:
    """A drafter with a shorter context helps as long as it can; then decoding is plain."""
    stack = started(
        mode="ssd",
        target=Target(SALTS[0]),
        prompt=[1, 2],
        limits=ENDLESS,
        num_draft_tokens=2,
        drafter_context=20,
    ).calm()
    stack.assert_plain()
    recorder = stack.sequence.recorder
    assert recorder.hits > 0
    assert recorder.fallbacks["no_drafter"] > 0


def test_a_target_that_cannot_rewind_decodes_plainly() -> None:
    """A verifier that can roll nothing back never gets a draft token."""
    stack = started(
        mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS, max_draft=0
    ).calm()
    stack.assert_plain()
    assert stack.sequence.recorder.drafted == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_cancelled_request_is_closed_everywhere(mode: Mode) -> None:
    """Finishing closes the sequence at its services once, and nothing follows it."""
    stack = started(mode=mode, target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS)
    stack.outcome_arrives()
    stack.do(stack.sequence.finish("cancelled"))
    assert stack.sequence.phase is Phase.FINISHED
    before = len(stack.actions)
    stack.do(stack.sequence.finish("error", "again"))
    stack.chaos(200)
    assert stack.actions[before:] == []
    assert [Finish("cancelled")] == stack.finishes
    closes = [
        a for a in stack.actions[:before] if isinstance(getattr(a, "message", 0), CloseSequence)
    ]
    assert len(closes) == (1 if mode == "ar" else 2)


def test_an_answer_may_be_ended_while_it_is_emitted() -> None:
    """A stop string found in the emitted text ends the request, although a round is in flight."""
    stack = started(mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS)
    assert stack.verifier is not None
    [answer] = stack.verifier.answers
    stack.do(stack.sequence.decide(answer, 1.0))
    for action in stack.sequence.record(1.0):
        if isinstance(action, Emit):
            stack.do(stack.sequence.finish("stop"))
    assert [Finish("stop")] == stack.finishes
    stack.chaos(100)
    assert [Finish("stop")] == stack.finishes


def verifies(stack: Stack) -> list[Verify]:
    """Everything that the verifier was asked to verify."""
    sent = [a.message for a in stack.actions if isinstance(a, ToVerifier)]
    return [message for message in sent if isinstance(message, Verify)]


def granted(stack: Stack) -> list[tuple[int, int]]:
    """Of every verification: how long its chain was, and how many tokens may follow unasked."""
    return [(len(message.nodes), message.granted) for message in verifies(stack)]


def renewed(stack: Stack) -> list[int]:
    """How many tokens more were granted in the middle of a run, each time."""
    sent = [a.message for a in stack.actions if isinstance(a, ToVerifier)]
    return [message.granted for message in sent if isinstance(message, Extend)]


def revoked(stack: Stack) -> int:
    """How often a free run was ended."""
    sent = [a.message for a in stack.actions if isinstance(a, ToVerifier)]
    return sum(isinstance(message, Revoke) for message in sent)


def test_plain_decoding_is_asked_for_once() -> None:
    """As many tokens as the answer may have; a stop token ends them at the verifier."""
    limits, target = Limits(5, frozenset(), 0), Target(3)
    stack = started(mode="ar", target=target, prompt=[1, 2], limits=limits).calm()
    assert granted(stack) == [(1, 4)]
    assert revoked(stack) == 0
    stack.assert_plain()
    stop = target.plain([1, 2], limits)[0][2]
    stopping = Limits(9, frozenset({stop}), 0)
    stack = started(mode="ar", target=target, prompt=[1, 2], limits=stopping).calm()
    stack.assert_plain()
    assert [message.stop_ids for message in verifies(stack)] == [[stop]]


def test_a_free_run_is_bounded_by_what_may_wait_unread() -> None:
    """More is granted when half of it is used: a slow reader is not flooded, and nobody waits."""
    limits = Limits(5 * MOST_GRANTED // 2, frozenset(), 0)
    stack = started(mode="ar", target=Target(3), prompt=[1, 2], limits=limits).calm()
    assert granted(stack) == [(1, MOST_GRANTED)]
    assert renewed(stack) == [MOST_GRANTED // 2] * 2 + [MOST_GRANTED // 2 - 1]
    assert revoked(stack) == 0
    stack.assert_plain()


def test_a_run_that_ended_by_itself_is_not_renewed() -> None:
    """A stop token ended it while its outcome was on the way: the verifier knows of no run."""
    limits, target = Limits(2 * MOST_GRANTED, frozenset(), 0), Target(3)
    stop = target.plain([1, 2], limits)[0][MOST_GRANTED // 2]
    first = target.plain([1, 2], limits)[0].index(stop)
    stopping = Limits(2 * MOST_GRANTED, frozenset({stop}), 0)
    stack = started(mode="ar", target=target, prompt=[1, 2], limits=stopping).calm()
    assert renewed(stack) == []
    assert len(stack.truth) == first
    stack.assert_plain()


@pytest.mark.parametrize("streams", [1, 4, 32, 10_000])
def test_free_runs_share_what_may_wait_unread(streams: int) -> None:
    """However many answers there are, all their outcomes fit into the queue."""
    limits, estimates = Limits(100, frozenset(), 0), CostModel()
    estimates.streams = streams
    plan: Any = {"mode": "ar", "prompt": [1, 2], "limits": limits, "estimates": estimates}
    stack = started(target=Target(3), **plan)
    unasked = granted(stack)[0][1]
    assert 1 <= unasked <= max(1, MOST_GRANTED // streams)
    stack.calm().assert_plain()


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_nothing_comes_unasked_where_drafts_are_to_come(mode: Mode) -> None:
    limits = Limits(20, frozenset(), 0)
    plan: Any = {"mode": mode, "target": Target(3), "prompt": [1, 2], "limits": limits}
    stack = started(num_draft_tokens=2, **plan).calm()
    assert not any(unasked for _, unasked in granted(stack))


@pytest.mark.parametrize("seed", range(8))
def test_a_drafter_that_comes_ends_a_free_run(seed: int) -> None:
    """Tokens that are on their way are used; then drafts are verified."""
    limits = Limits(40, frozenset(), 0)
    plan: Any = {"mode": "ssd", "target": Target(3), "prompt": [1, 2], "limits": limits}
    stack = started(seed=seed, **plan)
    stack.drafter_dies()
    for _ in range(5):
        stack.outcome_arrives()
    assert granted(stack)[-1][1] > 0
    stack.drafter_comes()
    assert revoked(stack) == 1
    stack.calm()
    stack.assert_plain()
    assert revoked(stack) == 1
    assert granted(stack)[-2][0] > 1
    assert stack.sequence.recorder.accepted > 0


def test_a_pause_is_a_free_run_until_something_better_comes() -> None:
    """A useless drafter: plain rounds come unasked, and lookups and trials end them."""
    limits = Limits(300, frozenset(), 0)
    plan: Any = {"mode": "ssd", "target": Target(3), "prompt": [1, 2], "limits": limits}
    stack = started(skill=0.0, estimates=CostModel(), **plan).calm()
    stack.assert_plain()
    grants = granted(stack)
    assert all(chain == 1 for chain, unasked in grants if unasked)
    assert len(grants) < stack.sequence.recorder.rounds
    assert revoked(stack) > 0


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_an_answer_without_drafts_runs_freely_from_its_first_token(mode: Mode) -> None:
    """Plain decoding is measured first: nothing is to come that its second token could wait for."""
    limits = Limits(20, frozenset(), 0)
    plan: Any = {"mode": mode, "target": Target(3), "prompt": [1, 2], "limits": limits}
    stack = started(estimates=CostModel(), **plan)
    assert granted(stack)[0][1] > 0
    stack.calm().assert_plain()


@given(PLANS, st.integers(0, 255))
def test_the_verifier_knows_whether_a_draft_is_prepared_meanwhile(
    plan: dict[str, Any], salt: int
) -> None:
    """`drafter_idle` is false exactly for the rounds that the drafter prepares for."""
    stack = Stack(target=Target(salt), **plan)
    stack.calm(1.0)
    sent = [a.message for a in stack.actions if isinstance(a, ToVerifier | ToDrafter)]
    prepared = {message.round for message in sent if isinstance(message, Prepare)}
    rounds = {m.round: m.drafter_idle for m in sent if isinstance(m, Verify)}
    assert {number: number not in prepared for number in rounds} == rounds


def test_what_went_on_before_the_verifier_was_asked_anew_is_not_taken() -> None:
    """One that introduces itself again is asked anew, while tokens of its free run are under way:
    they stand at other places than what it is asked for."""
    limits = Limits(40, frozenset(), 0)
    stack = started(mode="ar", target=Target(3), prompt=[1, 2], limits=limits)
    stack.outcome_arrives()
    assert stack.verifier is not None
    late = [stack.verifier.take() for _ in range(6)]
    stack.sequence.on_verifier_lost()
    stack.verifier_comes()
    for outcome in late:
        assert outcome is not None
        stack.do(stack.sequence.decide(outcome, stack.now))
        stack.do(stack.sequence.record(stack.now))
    stack.calm()
    stack.assert_plain()
