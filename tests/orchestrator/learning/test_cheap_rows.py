"""When further rows of a verification count as cheap."""

from orchestrator.learning.latency import VerifyLatency


def test_rows_are_cheap_once_that_was_seen_a_few_times() -> None:
    """A slow first pass makes those of the next ones look free."""
    latency = VerifyLatency()
    for _ in range(3):
        for rows, ms in ((2, 20.0), (6, 20.1)):
            assert not latency.has_cheap_rows
            latency.observe(rows, ms)
    assert latency.has_cheap_rows
