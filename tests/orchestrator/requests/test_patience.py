"""How long the target waits for a draft."""

from orchestrator.requests.patience import DraftTimeout


def test_a_draft_is_waited_for_as_long_as_drafts_take() -> None:
    """At least half a second, ten times the usual, and never more than the limit."""
    patience = DraftTimeout(5.0)
    assert [patience.wait_s(usual) for usual in (0.0, 20.0, 100.0, 900.0)] == [0.5, 0.5, 1.0, 5.0]


def test_a_late_drafter_is_hardly_waited_for() -> None:
    """After one draft did not come, the next miss costs 20 ms, until the drafter speaks again."""
    patience = DraftTimeout(5.0)
    patience.late()
    assert patience.wait_s(100.0) == 0.02
    patience.came()
    assert patience.wait_s(100.0) == 1.0
