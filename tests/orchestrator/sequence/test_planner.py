"""Decisions that the state machine asks for: the backup after a miss, and the fan-out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.learning.cost_model import CostModel
from orchestrator.sequence.planner import Planner
from tests.support.fakes import chain_of, judged, observed


def taught(alpha: float = 0.5, token_ms: float = 0.0) -> CostModel:
    """Verifying m tokens takes 8 + 2 m ms; draft tokens are accepted at `alpha`."""
    estimates = judged()
    estimates.verify_latency.expect({tokens: 8.0 + 2.0 * tokens for tokens in (1, 12)})
    estimates.alpha.observe(alpha)
    if token_ms:
        for depth in (1, 2, 3):
            estimates.observe_step(depth, token_ms)
        estimates.backup_ms.observe(token_ms)
    return estimates


@pytest.mark.parametrize(
    ("alpha", "token_ms", "expected"),
    [
        # Plain decoding takes 10 ms per token: a draft token must be worth a tenth of its ms.
        (0.5, 1.0, 1),  # .50 > .3 > .25
        (0.6, 1.0, 2),  # .36 > .3 > .22
        (0.7, 1.0, 3),  # .34 > .3 > .24
        (0.9, 1.0, 4),  # as deep as drafts go
        (0.5, 2.9, 1),
        (0.5, 3.1, 0),  # .50 < .51
        (0.1, 0.1, 0),
    ],
)
def test_the_target_waits_as_long_as_that_pays(
    alpha: float, token_ms: float, expected: int
) -> None:
    """Each further token of a backup is worth its verification and the wait for it."""
    assert expected == Planner("ssd", taught(alpha, token_ms)).backup_length()


def test_the_target_does_not_wait_for_what_nobody_has_timed() -> None:
    """Before any drafting was measured, a miss is followed by plain decoding of one token."""
    assert Planner("ssd", taught(0.9)).backup_length() == 0


@pytest.mark.parametrize(("idle_ms", "expected"), [(3.5, 3), (9.0, 3), (10.5, 0)])
def test_what_a_wait_costs_besides_its_tokens_counts(idle_ms: float, expected: int) -> None:
    """The target idled this long for a draft that took 3 ms; .5 ms are usual after a hit.

    A millisecond is a tenth of a token, and three tokens bring .63 more than they cost.
    """
    estimates = taught(0.7, 1.0)
    estimates.observe_round(observed(by_hand=True, idle_ms=0.5))
    estimates.observe_round(observed(by_hand=True, origin="miss", idle_ms=idle_ms, waited_ms=3.0))
    assert Planner("ssd", estimates).backup_length() == expected


@given(st.integers(1, 8), st.floats(0.0, 1.0), st.floats(0.0, 100.0))
def test_a_lookahead_is_kept_after_a_miss(
    num_draft_tokens: int, alpha: float, token_ms: float
) -> None:
    """With a lookahead fixed by hand the target always waits for that many tokens."""
    assert (
        num_draft_tokens
        == Planner("ssd", taught(alpha, token_ms), num_draft_tokens).backup_length()
    )


def test_the_fan_out_follows_what_was_learned_of_its_kind() -> None:
    """Where the best candidate always was the bonus token, one branch per rejection is enough."""
    estimates = taught()
    for _ in range(500):
        estimates.after_rejection["hit"].observe(0, 4)
        estimates.after_all["hit"].observe(None, 1)
    plan = Planner("ssd", estimates, fixed_branches=12)
    draft = chain_of([0.5, 0.5])
    sure, unsure = plan.fan_out(draft, "hit"), plan.fan_out(draft, "miss")
    assert max(sure[:2]) <= 2
    assert sure[2] > unsure[2]


@given(st.lists(st.floats(0.0, 1.0), max_size=8), st.integers(1, 64))
def test_the_fan_out_spends_the_budget(confidences: list[float], budget: int) -> None:
    """One count per acceptance length; together they are the budget."""
    planner = Planner("ssd", taught(), fixed_branches=budget)
    counts = planner.fan_out(chain_of(confidences), "hit")
    assert len(confidences) + 1 == len(counts)
    assert budget == sum(counts)
    assert min(counts) >= 0
