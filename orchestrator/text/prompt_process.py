"""A worker process that tokenises prompts; it is restarted after a crash."""

import logging
import os
import subprocess
import sys
import threading

import msgspec

from protocol.errors import ServiceLost, SsdError, UsageError
from protocol.messages import EncodePrompt, FromPromptWorker, PromptTokens, Rejected, Tokens
from protocol.process.deadline import Deadline
from protocol.process.helper import await_helper, has_broken_down
from protocol.settings import PromptWorkerSettings, encode_settings
from protocol.transport.codec import Decoder
from protocol.transport.pipes import PipeChannel

_log = logging.getLogger(__name__)

_READY_S = 60.0
"""Time limit for the worker to load the tokenizer, and to read a prompt."""
_ATTEMPTS = 2
"""Attempts per prompt: another program may kill a worker once; a second death is the prompt's."""


class PromptLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Cost limits of a prompt; 0 means unlimited."""

    max_bytes: int
    """Size of the text of all its parts."""
    timeout_s: float
    memory_bytes: int


class PromptProcess:
    """The worker process; it is restarted whenever it had to be killed."""

    def __init__(self, folder: str, limits: PromptLimits, *, parse_special: bool) -> None:
        self._folder = folder
        self._parse_special = parse_special
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: PipeChannel[FromPromptWorker] | None = None
        self._ends: list[int] = []
        """This process's ends of the pipes."""
        self._turn = threading.Lock()
        """Held while a thread communicates with the process."""
        self._closed = False

    def encode(self, prompt: EncodePrompt) -> Tokens | UsageError | ServiceLost:
        """Return the tokens, or the error why there are none."""
        with self._turn:
            return self._ask(prompt)

    def _ask(self, prompt: EncodePrompt) -> Tokens | UsageError | ServiceLost:
        """Ask the process, and a fresh one if the first was killed or closed."""
        is_to_blame = False
        for _ in range(_ATTEMPTS):
            if self._closed:
                break
            try:
                channel = self._channel or self._start()
                answer = self._exchange(channel, prompt)
            except (SsdError, OSError) as error:
                is_to_blame = self._process is not None and has_broken_down(self._process)
                self._end()
                _log.warning("the prompt worker was lost: %s", error)
                continue
            if answer is None:
                self._end()
                return UsageError(
                    f"the prompt could not be tokenised within {self._limits.timeout_s:g} s "
                    "(prompt_timeout_s)"
                )
            if isinstance(answer, PromptTokens):
                return answer.tokens
            reason = answer.reason if isinstance(answer, Rejected) else "the worker restarted"
            return UsageError(reason)
        if is_to_blame:
            return UsageError("the prompt cannot be tokenised: the process that tried it ended")
        return ServiceLost("the process that tokenises prompts was ended twice; try again")

    def _exchange(
        self, channel: PipeChannel[FromPromptWorker], prompt: EncodePrompt
    ) -> FromPromptWorker | None:
        """Return the worker's answer; None if the prompt takes too long."""
        assert self._process is not None  # noqa: S101  # it was started with its channel
        channel.send(prompt, _READY_S)
        deadline = Deadline(self._limits.timeout_s or threading.TIMEOUT_MAX)
        if not await_helper(self._process.pid, channel.ready, deadline, lambda: False):
            return None
        return channel.receive(0.0, "tokens of the prompt")

    def _start(self) -> PipeChannel[FromPromptWorker]:
        (lifeline, kept), (reading, answers), (prompts, writing) = os.pipe(), os.pipe(), os.pipe()
        self._ends = [kept, reading, writing]
        settings = PromptWorkerSettings(
            lifeline=lifeline,
            model=self._folder,
            max_bytes=self._limits.memory_bytes,
            parse_special=self._parse_special,
        )
        command = [sys.executable, "-m", "orchestrator.text.prompt_worker"]
        try:
            self._process = subprocess.Popen(
                [*command, encode_settings(settings)],
                stdin=prompts,
                stdout=answers,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        finally:
            for end in (lifeline, answers, prompts):
                os.close(end)
        channel = PipeChannel[FromPromptWorker](reading, writing, Decoder(FromPromptWorker))
        channel.receive(_READY_S, "sign that the prompt worker is ready")
        self._channel = channel
        return channel

    def close(self) -> None:
        """End the process even while it works; later prompts are rejected."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # wakes the thread that waits for it
        with self._turn:
            self._end()

    def _end(self) -> None:
        """End the process; the next prompt starts a new one."""
        self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for end in self._ends:
            os.close(end)
        self._ends = []
