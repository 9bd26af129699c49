"""What `ssd distill` says of the drafter that it has trained."""

import pytest

from launch.commands.distill import _show, judge_drafter
from protocol.jobs.distill import DistillFinished


@pytest.mark.parametrize(
    ("agreement", "verdict"),
    [(0.0, "USELESS"), (0.19, "USELESS"), (0.3, "poor"), (0.6, ""), (1.0, "")],
)
def test_a_drafter_is_judged(agreement: float, verdict: str) -> None:
    """By how often it says what the target says; a good one needs no comment."""
    assert judge_drafter(agreement).partition(":")[0] == verdict


def test_a_useless_drafter_is_told_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the figures, with what to change; not in the JSON, which has the figures."""
    figures = {
        "greedy_agreement": 0.05,
        "by_category": {},
        "acceptance": [],
        "hits": {},
        "hits_after_rejection": {},
    }
    finished = DistillFinished(out="drafter", complete=True, figures={"figures": figures})
    _show(finished, as_json=False)
    printed = capsys.readouterr().out
    assert "USELESS: 5% of its tokens are the target's" in printed
    assert "--minutes" in printed
    _show(finished, as_json=True)
    assert "USELESS" not in capsys.readouterr().out
