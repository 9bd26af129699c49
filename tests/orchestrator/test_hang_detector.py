"""Who hangs: silence is counted while we are awake, and judged by what calls take here."""

import pytest

from orchestrator.hang_detector import HangDetector

A, B = b"a", b"b"


def watching(*, worked: bool = True) -> HangDetector:
    """A vigil over one service, with 10 s for a hang and 100 s for the first work."""
    vigil = HangDetector(10.0, 100.0)
    vigil.watch(A)
    vigil.on_message(A, is_result=worked)
    vigil.update(0.0)
    return vigil


def silence(vigil: HangDetector, seconds: int, start: int = 0) -> int | None:
    """Let seconds pass one by one; the first one at which A hangs."""
    for second in range(start + 1, start + seconds + 1):
        if vigil.update(float(second)):
            return second - start
    return None


def test_silence_is_a_hang() -> None:
    """A service that has worked before may be silent for the timeout and no longer."""
    assert silence(watching(), 60) == 11


def test_the_first_work_may_take_longer() -> None:
    """Until its first result a service may compile and load."""
    assert silence(watching(worked=False), 200) == 101


def test_one_service_may_have_less_time_for_its_first_work() -> None:
    """Only for that: later silence is judged as everybody's."""
    vigil = watching(worked=False)
    vigil.watch(A, 20.0)
    assert silence(vigil, 60) == 21
    vigil.on_message(A, is_result=True)
    assert silence(vigil, 9, start=21) is None


def test_signs_of_life_end_the_silence() -> None:
    """Whatever is heard starts the count again."""
    vigil = watching()
    assert silence(vigil, 9) is None
    vigil.on_message(A, is_result=False)
    assert silence(vigil, 9, start=9) is None


def test_slow_calls_are_allowed_for() -> None:
    """Where a call took 9 s, another may take four times as long, but not for ever."""
    vigil = watching()
    silence(vigil, 9)
    vigil.on_message(A, is_result=True)
    assert silence(vigil, 60, start=9) == 37


def test_the_allowance_is_bounded() -> None:
    """However slow a call was, no silence is longer than that of the first work."""
    vigil = watching(worked=False)
    silence(vigil, 90)
    vigil.on_message(A, is_result=True)
    assert silence(vigil, 200, start=90) == 101


def test_time_in_which_we_slept_counts_for_nobody() -> None:
    """After an hour in which we did not run, one second has passed."""
    vigil = watching()
    assert vigil.update(3600.0) == []
    assert vigil.silent_s(A) == 1.0


def test_each_is_judged_alone() -> None:
    """The silence of one is not the other's."""
    vigil = watching()
    vigil.watch(B)
    vigil.on_message(B, is_result=True)
    for second in range(1, 12):
        vigil.on_message(B, is_result=False)
        hanging = vigil.update(float(second))
    assert hanging == [A]


@pytest.mark.parametrize("address", [A, B])
def test_who_is_not_watched_does_not_hang(address: bytes) -> None:
    """After its end, or if it never began, nothing is said about a service."""
    vigil = watching()
    vigil.forget(A)
    vigil.on_message(address, is_result=True)
    assert silence(vigil, 60) is None
    assert vigil.silent_s(address) == 0.0


def test_a_step_may_be_less_than_the_limit() -> None:
    """After a sleep of its own, a process that was seen silent before has not used up its time."""
    detector = HangDetector(1.0, 1.0, 0.5)
    detector.watch(b"v")
    detector.update(0.0)
    detector.update(0.4)
    assert detector.update(3600.0) == []
    assert detector.update(3600.3) == [b"v"]


def test_a_limit_names_its_setting() -> None:
    """Until the first result it is that of the start, then that of a hang."""
    assert watching(worked=False).describe_limit(A) == (
        "the limit is 100 s: start_timeout_s, for the first work"
    )
    assert watching().describe_limit(A) == "the limit is 10 s: hang_timeout_s"


def test_a_call_that_was_announced_may_take_its_time() -> None:
    """Until the next message: then the usual limit holds again."""
    vigil = watching()
    vigil.on_message(A, is_result=False, busy_s=50.0)
    assert silence(vigil, 60) == 51
    vigil = watching()
    vigil.on_message(A, is_result=False, busy_s=50.0)
    vigil.on_message(A, is_result=False)
    assert silence(vigil, 60) == 11
