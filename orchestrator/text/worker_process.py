"""A worker process that tokenises prompts or checks grammars; replaced whenever it is lost."""

import logging
import os
import subprocess
import sys
import threading
from typing import Literal

import msgspec
import psutil

from protocol.errors import RuntimeFailure, ServiceLost, SsdError
from protocol.messages import FromTextWorker, ToTextWorker
from protocol.process.closeable import Closeable
from protocol.process.deadline import Deadline
from protocol.process.helper import await_helper, has_broken_down
from protocol.settings import TextWorkerSettings, encode_settings
from protocol.transport.codec import Decoder
from protocol.transport.pipes import PipeChannel

_log = logging.getLogger(__name__)

_READY_S = 120.0
"""Time limit for the worker to load a tokenizer of any size on a busy machine."""
_WRITE_S = 60.0
"""Time limit for the idle worker to receive a message."""
_ATTEMPTS = 2
"""Attempts per message: another program may kill a worker once; a second death is the message's."""

Failure = Literal["late", "broken"]
"""late: the answer took too long; broken: the process broke down of it."""


class WorkerProcess(Closeable):
    """One worker, for any thread; it starts with the first message.

    Args:
        settings: of the process; its lifeline is chosen here.
        work: what it does, for messages.
    """

    def __init__(self, settings: TextWorkerSettings, work: str) -> None:
        self._settings = settings
        self._name = f"the process that {work}"
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: PipeChannel[FromTextWorker] | None = None
        self._ends: list[int] = []
        """This process's ends of the pipes."""
        self._turn = threading.Lock()
        """Held while a thread communicates with the process."""
        self._closed = False

    def prepare(self) -> None:
        """Start the process before there is any work for it."""
        with self._turn:
            if self._closed:
                return
            try:
                self._start()
            except (SsdError, OSError) as error:
                self._end()
                _log.warning("%s does not start yet: %s", self._name, error)

    def ask(
        self, message: ToTextWorker, timeout_s: float, processor_s: float = 0.0
    ) -> FromTextWorker | Failure:
        """Return the answer, or the failure that is the message's own.

        Args:
            message: the question.
            timeout_s: longest time for the answer; 0 is unlimited.
            processor_s: limit in processor time; on a busy machine it takes longer; 0 is unlimited.

        Raises:
            ServiceLost: other programs ended the process repeatedly, or it is closed.
        """
        is_to_blame = False
        with self._turn:
            for _ in range(_ATTEMPTS):
                if self._closed:
                    break
                try:
                    channel = self._channel or self._start()
                    answer = self._exchange(channel, message, timeout_s, processor_s)
                except (SsdError, OSError, psutil.Error) as error:
                    is_to_blame = self._process is not None and has_broken_down(self._process)
                    self._end()
                    _log.warning("%s was lost: %s", self._name, error)
                    continue
                if answer is None:
                    self._end()  # its answer would be taken for the next one's
                    return "late"
                return answer
        if is_to_blame:
            return "broken"
        raise ServiceLost(f"{self._name} was ended twice; try again")

    def _exchange(
        self,
        channel: PipeChannel[FromTextWorker],
        message: ToTextWorker,
        timeout_s: float,
        processor_s: float,
    ) -> FromTextWorker | None:
        """Return the worker's answer; None if it takes too long.

        Raises:
            RuntimeFailure: the process has ended, is stopped, or gets no processor time.
        """
        assert self._process is not None  # noqa: S101  # it was started with its channel
        measure = psutil.Process(self._process.pid).cpu_times
        before_s = sum(measure()[:2])

        def has_spent() -> bool:
            return 0 < processor_s < sum(measure()[:2]) - before_s

        channel.send(message, _WRITE_S)
        deadline = Deadline(timeout_s or threading.TIMEOUT_MAX)
        if await_helper(self._process.pid, channel.ready, deadline, has_spent):
            return channel.receive(0.0, "answer")
        if processor_s and not has_spent():
            raise RuntimeFailure(f"{self._name} gets no processor")
        return None

    def _start(self) -> PipeChannel[FromTextWorker]:
        (lifeline, kept), (reading, answers), (questions, writing) = os.pipe(), os.pipe(), os.pipe()
        self._ends = [kept, reading, writing]
        settings = msgspec.structs.replace(self._settings, lifeline=lifeline)
        command = [sys.executable, "-P", "-m", "orchestrator.text.worker"]
        try:
            self._process = subprocess.Popen(
                [*command, encode_settings(settings)],
                stdin=questions,
                stdout=answers,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        finally:
            for end in (lifeline, answers, questions):
                os.close(end)
        channel = PipeChannel[FromTextWorker](reading, writing, Decoder(FromTextWorker))
        channel.receive(_READY_S, "sign that it is ready")
        self._channel = channel
        return channel

    def close(self) -> None:
        """End the process even while it works; later messages are rejected."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # wakes the thread that waits for it
        with self._turn:
            self._end()

    def _end(self) -> None:
        """End the process; the next message starts a new one."""
        self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for end in self._ends:
            os.close(end)
        self._ends = []
