"""What a sequence tells the estimates about its rounds."""

from itertools import pairwise

import pytest

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.round_observation import RoundObservation
from orchestrator.sequence.limits import Limits
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.round import Round
from protocol.messages import Mode, VerificationOutcome
from tests.orchestrator.sequence.test_drafter_sync import observing
from tests.support.fakes import Stack, Target

OUTCOME = VerificationOutcome(sequence=1, round=1, accepted=0, bonus=5, verify_ms=20.0, idle_ms=1.0)


def watched(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> tuple[Stack, list[RoundObservation]]:
    """A sequence that begins, and what it will tell."""
    estimates, observations = CostModel(), list[RoundObservation]()
    monkeypatch.setattr(
        estimates, "observe_round", observing(observations, estimates.observe_round)
    )
    limits = Limits(40, frozenset(), 0)
    stack = Stack(mode=mode, target=Target(0), prompt=[1], limits=limits, estimates=estimates)
    return stack, observations


def test_rounds_of_a_free_run_behind_the_first_continue_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their passes had begun before: the first one alone says what a start costs."""
    stack, observations = watched("ar", monkeypatch)
    stack.calm().assert_plain()
    before = [False, *(outcome.goes_on for outcome in stack.past_outcomes)]
    assert [observation.continues_run for observation in observations] == before[
        : len(observations)
    ]
    assert True in before


def test_how_long_a_draft_was_waited_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, observations = watched("sd", monkeypatch)
    stack.drafter_comes()
    stack.verifier_comes()
    while stack.sequence.phase is not Phase.DRAFTING:
        stack.outcome_arrives()
    stack.now += 0.003
    stack.calm()
    waited = [observation.waited_ms for observation in observations if observation.origin == "miss"]
    assert waited[0] == pytest.approx(3.0)
    assert not any(
        observation.waited_ms for observation in observations if observation.origin != "miss"
    )


def test_the_time_between_a_requests_tokens_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, observations = watched("ar", monkeypatch)
    stack.calm()
    assert observations[0].since_last_ms is None
    for before, after in pairwise(observations):
        assert after.since_last_ms == pytest.approx(1e3 * (after.ended_at - before.ended_at))


@pytest.mark.parametrize("right", [True, False])
def test_what_became_of_a_lookup_is_told(*, right: bool) -> None:
    planner = Planner("ssd", CostModel())
    done = Round([4])
    assert done.observe(OUTCOME, planner, ended_at=1.0, last_token_at=0.5).unverified_lookup is None
    done.unverified_lookup.add(5 if right else 6, 0.75, parent=0)
    observation = done.observe(OUTCOME, planner, ended_at=1.0, last_token_at=0.5)
    assert observation.unverified_lookup == (0.75, right)
