"""Whether a trial of speculation is called off by what the drafter would have foreseen."""

import pytest

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.replay import RoundCosts, could_pay
from orchestrator.learning.speculation_switch import SpeculationSwitch

COSTS = RoundCosts(plain=10.0, verify=lambda rows: 12.0 + 2.5 * rows, wait=4.0)


@pytest.mark.parametrize(("foreseen", "pays"), [(0, False), (16, False), (34, True), (40, True)])
def test_rare_hits_cannot_pay(foreseen: int, *, pays: bool) -> None:
    """Where a verification takes two passes' time, two tokens a round are needed."""
    assert could_pay(foreseen, 40, COSTS) == pays


def test_few_tokens_say_nothing() -> None:
    """Nor does anything where plain decoding was not measured."""
    assert could_pay(0, 7, COSTS)
    assert could_pay(0, 40, COSTS._replace(plain=0.0))


def test_fewer_tokens_leave_more_doubt() -> None:
    """Half of ten may be luck, half of a thousand is not."""
    assert could_pay(6, 10, COSTS)
    assert not could_pay(600, 1000, COSTS)


def test_cheap_rounds_pay_sooner() -> None:
    """By what was measured here."""
    assert could_pay(16, 40, RoundCosts(10.0, lambda _rows: 11.0, 0.0))


def paused() -> SpeculationSwitch:
    """After a trial that lost, at the next one."""
    switch = SpeculationSwitch()
    while not switch.is_paused:
        switch.observe(1.0, 30.0 if switch.speculating else 10.0, 0)
    while switch.is_paused:
        switch.observe(1.0, 10.0, 0)
    return switch


def test_a_trial_that_cannot_succeed_is_called_off() -> None:
    """The pause is no longer for it, and there is a trial after it again."""
    switch = paused()
    assert switch.is_trial_due
    switch.call_off_trial()
    assert switch.is_paused
    rounds = 0
    while switch.is_paused:
        switch.observe(1.0, 10.0, 0)
        rounds += 1
    assert rounds < 110
    assert switch.is_trial_due


def test_a_trial_under_way_goes_on() -> None:
    """What its rounds bring tells more."""
    switch = paused()
    switch.observe(3.0, 20.0, 2)
    switch.call_off_trial()
    assert switch.speculating


@pytest.mark.parametrize(("foreseen", "speculates"), [(2, False), (38, True)])
def test_the_costs_are_those_that_were_measured(foreseen: int, *, speculates: bool) -> None:
    estimates = CostModel()
    estimates.switches["ssd"] = switch = paused()
    for rows in (2, 3, 4):
        estimates.verify_latency.observe(rows, 14.0 + 2.0 * rows)
    estimates.observe_replay("ssd", foreseen, 40)
    assert switch.speculating == speculates
    estimates.observe_replay("ar", 0, 40)  # it has no drafter
