"""The longest step of a loop, by clocks that are set by hand."""

from protocol.process.step_times import StepTimes


def test_the_longest_step_of_late_is_kept() -> None:
    """Waiting is no part of a step, and a step is forgotten after ten to twenty seconds."""
    times = {"cpu": 0.0, "now": 100.0}
    steps = StepTimes(lambda: times["cpu"], lambda: times["now"])
    longest = []
    for cpu_s, now in ((0.3, 101.0), (0.1, 109.0), (0.2, 112.0), (0.0, 119.0), (0.0, 121.0)):
        times["cpu"] += 5.0
        steps.begin()
        times |= {"cpu": times["cpu"] + cpu_s, "now": now}
        steps.end()
        longest.append(round(steps.longest_s, 3))
    assert longest == [0.3, 0.3, 0.3, 0.3, 0.2]
    times["now"] = 141.0
    assert steps.longest_s == 0.0
