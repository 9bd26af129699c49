"""Work of a service: one queue of messages per sequence, with sequences taking turns."""

import logging
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from protocol.errors import BackendLost
from protocol.messages import (
    CloseSequence,
    DraftNow,
    Extend,
    FromService,
    OpenSequence,
    Prepare,
    Revoke,
)
from protocol.process.logs import about
from services.runtime.inbox import Work

_log = logging.getLogger(__name__)


class Service(Protocol):
    """Methods of a verifier or drafter that the loop needs."""

    def handle(self, message: Work) -> Generator[FromService | None]:
        """Do the work of one message, yielding its answers as they are ready.

        None is a point where it may be abandoned, and where other sequences can run.
        """
        ...

    def supersedes(self, news: Work, current: Work) -> bool:
        """Return True if `news` makes the remaining answers to `current` pointless."""
        ...

    def linger_s(self, message: Work) -> float:
        """Return how long it pays to wait for other messages before continuing with this one."""
        ...


@dataclass
class Job:
    """A message, and the work on it once started."""

    message: Work
    answers: Generator[FromService | None] | None = None

    def abandon(self) -> None:
        """Abandon the work; an error on its way out is logged, and other work continues."""
        if self.answers is None:
            return
        try:
            self.answers.close()
        except BackendLost:
            raise
        except Exception:  # noqa: BLE001  # whatever one request leads to
            number = self.message.sequence
            _log.exception("abandoned work failed", extra=about(sequence=number))


class WorkQueue:
    """Queues each sequence's messages in order; new sequences run first, then round-robin."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lines: dict[int, deque[Job]] = {}
        self._opened: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def has_open(self) -> bool:
        """True if a sequence has been opened and not closed."""
        return bool(self._opened)

    def add(self, message: Work) -> None:
        """Queue a message; drop work that it makes pointless.

        `Revoke` and `Extend` refer to work in progress and are handled immediately.
        """
        if isinstance(message, Revoke | Extend):
            deque(self._service.handle(message), maxlen=0)
            return
        if isinstance(message, OpenSequence):
            self._opened.add(message.sequence)
        if isinstance(message, CloseSequence):
            self._opened.discard(message.sequence)
        line = self._lines.setdefault(message.sequence, deque())
        for job in [job for job in line if self._service.supersedes(message, job.message)]:
            if job.answers is not None:
                job.abandon()
            else:
                message = _merge(job.message, message)
            line.remove(job)
        line.append(Job(message))

    def next(self) -> Job:
        """Return the next job; the queue must not be empty."""
        lines = self._lines.values()
        for line in lines:
            if line[0].answers is None:
                return line[0]
        return next(iter(lines))[0]

    def rotate(self, job: Job) -> None:
        """Move the job to the end of the queue after a step."""
        sequence = job.message.sequence
        self._lines[sequence] = self._lines.pop(sequence)

    def finish(self, job: Job) -> None:
        """Remove a finished job."""
        job.abandon()
        line = self._lines[job.message.sequence]
        line.remove(job)
        if not line:
            del self._lines[job.message.sequence]

    def clear(self) -> list[int]:
        """Drop everything; return the sequences that were opened and not closed."""
        for line in self._lines.values():
            for job in line:
                job.abandon()
        self._lines.clear()
        return sorted(self._opened)


def _merge(old: Work, new: Work) -> Work:
    """Return `new` in place of both, with the committed tokens that `old` reported."""
    if not isinstance(old, Prepare | DraftNow) or not isinstance(new, Prepare | DraftNow):
        return new
    count = new.base - old.base
    if count <= 0:
        return new
    return msgspec.structs.replace(new, base=old.base, tokens=old.tokens[:count] + new.tokens)
