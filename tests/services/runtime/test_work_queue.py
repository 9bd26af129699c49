"""Work that is abandoned belongs to one sequence, and so does what it runs into at its end."""

from collections.abc import Generator

import pytest

from protocol.errors import BackendLost
from protocol.messages import FromService, Prepare
from services.runtime.inbox import Work
from services.runtime.work_queue import WorkQueue


def prepare(round_: int) -> Prepare:
    return Prepare(sequence=1, round=round_, base=0, tokens=[], nodes=[1], fan_out=[1], depth=1)


class Failing:
    """A service whose work fails when it is closed."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def handle(self, message: Work) -> Generator[FromService | None]:
        del message
        try:
            yield None
        finally:
            raise self._error

    def supersedes(self, news: Work, current: Work) -> bool:
        return news.sequence == current.sequence

    def linger_s(self, message: Work) -> float:
        del message
        return 0.0


def begun(error: Exception) -> WorkQueue:
    """A queue with work that is under way."""
    service = Failing(error)
    queue = WorkQueue(service)
    queue.add(prepare(1))
    job = queue.next()
    job.answers = service.handle(job.message)
    next(job.answers)
    return queue


def test_work_that_fails_at_its_end_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Whether news, the end of its turn or a new orchestrator ends it."""
    queue = begun(ValueError("the cache is gone"))
    queue.add(prepare(2))
    assert queue.next().message == prepare(2)
    queue = begun(ValueError("the cache is gone"))
    queue.finish(queue.next())
    assert not queue
    begun(ValueError("the cache is gone")).clear()
    assert caplog.text.count("the cache is gone") == 3


def test_a_lost_backend_ends_the_process() -> None:
    """There is nothing left to draft with."""
    with pytest.raises(BackendLost):
        begun(BackendLost("it died")).add(prepare(2))
