"""What `ssd top` draws."""

from rich.console import Console

from launch.stack.snapshot import StackSnapshot
from launch.terminal.dashboard import draw
from protocol.messages import PreparationState, RankStatus, ServiceStatus, Status


def drawn(
    ranks: list[RankStatus],
    preparation: PreparationState = PreparationState(),  # noqa: B008
) -> str:
    """The picture of a stack whose verifier has these ranks."""
    verifier = ServiceStatus(
        role="verifier",
        pid=11,
        backend="mlx",
        model="big",
        compute_unit="gpu",
        context_length=0,
        ranks=ranks,
        preparation=preparation,
    )
    snapshot = StackSnapshot(
        name="default",
        at=0.0,
        uptime_s=1.0,
        processes=[],
        free_memory_bytes=0,
        status=Status(pid=1, model="big", services=[verifier], active=0, waiting=0),
        problems=[],
    )
    console = Console(width=80)
    with console.capture() as capture:
        console.print(draw(snapshot, [], ""))
    return capture.get()


def test_ranks_are_shown_with_their_links() -> None:
    """Where each one runs, what it holds, and how far the next one is."""
    rank = RankStatus(
        rank=1,
        host="studio",
        pid=77,
        part="0-11",
        weight_bytes=3 * 10**9,
        free_bytes=9 * 10**9,
        pass_ms=61.25,
        latency_ms=0.12,
        mbytes_per_s=1234.0,
    )
    row = next(line for line in drawn([rank]).splitlines() if "studio" in line)
    shown = ("77", "0-11", "3.0 GB", "9.0 GB", "61.2 ms", "0.12 ms", "1.2 GB/s")
    assert [part for part in shown if part not in row] == []


def test_a_verifier_of_one_process_has_no_such_table() -> None:
    """Nothing about ranks where there are none."""
    assert "ranks" not in drawn([])


def test_what_is_still_prepared_is_shown() -> None:
    """Until it is done."""
    left = PreparationState(done=3, total=8, stage="traces")
    shown = " ".join(drawn([], left).split())
    assert "the verifier prepares traces between requests: 3 of 8 stages done" in shown
    assert "prepares" not in drawn([], PreparationState(done=8, total=8))
