"""Work of a service: one line of messages per sequence, in turns between sequences."""

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

        None is a point where it may be abandoned, and where other sequences have their turn.
        """
        ...

    def supersedes(self, news: Work, current: Work) -> bool:
        """Return whether `news` makes the remaining answers to `current` pointless."""
        ...

    def linger_s(self, message: Work) -> float:
        """How long it pays to wait for other messages before going on with this one's work."""
        ...


@dataclass
class Job:
    """A message, and the work on it once it has begun."""

    message: Work
    answers: Generator[FromService | None] | None = None

    def abandon(self) -> None:
        """End the work; what it runs into at its end is its own, and others are served on."""
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
    """Messages of one sequence in their order; between sequences, new ones first, then turns."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lines: dict[int, deque[Job]] = {}
        self._opened: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, message: Work) -> None:
        """Take in a message; work that it makes pointless ends, or never begins.

        `Revoke` and `Extend` are about work in progress, and are handled at once.
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
        """The work to go on with; there must be some."""
        heads = [line[0] for line in self._lines.values()]
        return next((job for job in heads if job.answers is None), heads[0])

    def rotate(self, job: Job) -> None:
        """The job made a step: now others come first."""
        sequence = job.message.sequence
        self._lines[sequence] = self._lines.pop(sequence)

    def finish(self, job: Job) -> None:
        """The job is over."""
        job.abandon()
        line = self._lines[job.message.sequence]
        line.remove(job)
        if not line:
            del self._lines[job.message.sequence]

    def clear(self) -> list[int]:
        """Drop everything; returns the sequences that were opened and not closed."""
        for line in self._lines.values():
            for job in line:
                job.abandon()
        self._lines.clear()
        return sorted(self._opened)


def _merge(old: Work, new: Work) -> Work:
    """`new` in the place of both: it also carries the committed tokens that `old` reported."""
    if not isinstance(old, Prepare | DraftNow) or not isinstance(new, Prepare | DraftNow):
        return new
    count = new.base - old.base
    if count <= 0:
        return new
    return msgspec.structs.replace(new, base=old.base, tokens=old.tokens[:count] + new.tokens)
