"""One procedure says whether another way to compute is right and faster."""

import logging
from typing import Any

import mlx.core as mx
import pytest

from services.mlx import selftest
from services.mlx.selftest import UNTIMED, Way, check, is_right, measure_distance
from services.runtime.preparation import run_all
from tests.services.runtime.steps import at_once

ROWS = mx.array([1.0, 2.0, 2.0])


def scale(factor: float) -> Way:
    return lambda rows: factor * rows


def fail(rows: mx.array) -> mx.array:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(("ours_s", "faster"), [(0.9, True), (0.99, False)])
def test_what_is_right_is_used_if_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, ours_s: float, *, faster: bool
) -> None:
    monkeypatch.setattr(selftest, "time_in_turn", lambda _: at_once([1.0, ours_s]))
    verdict = run_all(check("a sum", "product", scale(1.0), scale(1.001), [(ROWS,)]))
    assert (verdict.right, verdict.faster) == (True, faster)
    assert verdict.distance == pytest.approx(0.001, rel=0.01)
    assert (verdict.usual_s, verdict.ours_s) == (1.0, ours_s)
    share = run_all(check("a sum", "product", scale(1.0), scale(1.0), [(ROWS,)], share=1.05))
    assert share.faster


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (scale(1.1), "0.1 from the usual"),
        (scale(float("nan")), "nan from the usual"),
        (fail, "no such kernel"),
    ],
)
def test_what_is_wrong_is_not_used(
    ours: Way, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so, and nothing is timed."""
    with caplog.at_level(logging.WARNING):
        verdict = run_all(check("a sum", "product", scale(1.0), ours, [(ROWS,)]))
    assert not verdict.right
    assert not verdict.faster
    assert reason in verdict.reason
    assert "a sum: " in caplog.text
    assert "not used" in caplog.text


def test_each_input_is_compared() -> None:
    """One that is wrong suffices, wherever it is in the list."""
    inputs: list[Any] = [(ROWS,), (2 * ROWS,), (3 * ROWS,)]

    def wrong_once(rows: mx.array) -> mx.array:
        return rows + (rows[0] == 2.0)

    assert is_right("a sum", "bits", scale(1.0), scale(1.0), inputs)
    assert not is_right("a sum", "bits", scale(1.0), wrong_once, inputs)


def test_what_is_not_timed_is_used_if_it_is_right() -> None:
    assert run_all(check("a sum", "bits", scale(1.0), scale(1.0), [(ROWS,)], share=UNTIMED)).faster


def test_lists_differ_as_much_as_their_worst() -> None:
    assert measure_distance([ROWS, ROWS], [ROWS, 1.5 * ROWS]) == pytest.approx(0.5)
