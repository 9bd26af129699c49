"""Checks grammars in a separate process, within a deadline."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import psutil

from protocol.decoding.grammar import check_size
from protocol.decoding.grammar_worker import DEADLINE_S
from protocol.errors import RuntimeFailure, ServiceLost, UsageError
from protocol.process.closeable import Closeable
from protocol.process.deadline import Deadline
from protocol.process.helper import await_helper, has_broken_down
from protocol.transport.pipes import READ_BYTES, readable, write_all

_log = logging.getLogger(__name__)

_START_S = 120.0
"""Time limit for the process to start and load a tokenizer of any size on a busy machine."""
_LONGEST_S = 15.0
"""Wall-clock limit for one grammar, however little processor time the process gets."""
_WRITE_S = 5.0
"""Time limit for the idle process to receive a grammar."""
_REMEMBERED = 256
_ATTEMPTS = 2
"""Attempts per grammar: a single death of the process may have other causes."""


class GrammarChecker(Closeable):
    """Checks grammars one after the other, for any thread; caches the results.

    Args:
        folder: the model folder, for its tokenizer; if empty, only the syntax is checked.
        deadline_s: limit for one grammar in processor time; on a busy machine it takes longer.
    """

    def __init__(self, folder: str, deadline_s: float = DEADLINE_S) -> None:
        self._command = [sys.executable, "-P", "-m", "protocol.decoding.grammar_worker"]
        self._command += [folder] if folder else []
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        """Held while a thread communicates with the process."""
        self._closed = False
        self._known: OrderedDict[str, str] = OrderedDict()
        """Reason why each grammar cannot be used; empty if it can."""

    def prepare(self) -> None:
        """Start the process, which loads the tokenizer, before there is a grammar to check."""
        with self._turn:
            if self._closed:
                return
            try:
                self._start()
            except (RuntimeFailure, OSError) as error:
                _log.warning("%s; the first grammar tries again", error)

    def check(self, grammar: str) -> None:
        """Return if the models can use the grammar; blocks for seconds at worst.

        Raises:
            UsageError: the grammar cannot be used, or exceeds a limit that the message names.
            ServiceLost: other programs killed the checking process repeatedly.
            RuntimeFailure: the checking process does not start.
        """
        check_size(grammar)
        with self._turn:
            if (reason := self._known.get(grammar)) is None:
                reason = self._known[grammar] = self._ask(grammar)
                while len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        if reason:
            raise UsageError(reason)

    def recall(self, grammar: str) -> str | None:
        """Return a cached error of `check`, "" if the grammar is usable, None if it is unknown."""
        return self._known.get(grammar)

    def _ask(self, grammar: str) -> str:
        is_to_blame = False
        for _ in range(_ATTEMPTS):
            try:
                process = self._start()
            except ServiceLost as error:
                _log.warning("%s", error)
                continue
            try:
                reason = _exchange(process, grammar, self._deadline_s)
            except (RuntimeFailure, OSError, ValueError, psutil.Error):
                is_to_blame = has_broken_down(process)
                self._end()
                continue
            if reason is not None:
                return reason
            self._end()  # its answer would be taken for the next one's
            return (
                f"the answer's grammar or schema takes more than {self._deadline_s:g} s to "
                "compile; simplify its patterns and references"
            )
        if is_to_blame:
            return "the answer's grammar or schema cannot be compiled; simplify it"
        raise ServiceLost("the process that checks grammars was ended twice; try again")

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        if self._closed:
            raise RuntimeFailure("grammars are not checked any more")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            ready = _await_line(self._process, Deadline(_START_S), lambda: False)
        except (RuntimeFailure, OSError) as error:
            self._end()
            raise ServiceLost("the process that checks grammars was ended at its start") from error
        if ready != "":
            self._end()
            raise RuntimeFailure(f"the process that checks grammars does not start: {ready}")
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._process = None

    def close(self) -> None:
        """End the process even while it works; later grammars are rejected."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # wakes the thread that waits for it
        with self._turn:
            self._end()


def _exchange(process: subprocess.Popen[bytes], grammar: str, deadline_s: float) -> str | None:
    """Return the answer to a grammar; None if it exceeds its processor time.

    Raises:
        RuntimeFailure: the process has ended, is stopped, or gets no processor time.
        psutil.Error: it has ended.
    """
    assert process.stdin is not None  # noqa: S101  # it was started with pipes
    line = json.dumps(grammar).encode() + b"\n"
    measure, longest = psutil.Process(process.pid).cpu_times, Deadline(_LONGEST_S)
    before_s = sum(measure()[:2])

    def has_spent() -> bool:
        return bool(sum(measure()[:2]) - before_s > deadline_s)

    write_all(process.stdin.fileno(), line, "reader of grammars", _WRITE_S)
    answer = _await_line(process, longest, has_spent)
    if answer is None and not has_spent():
        raise RuntimeFailure("the process that checks grammars gets no processor")
    return answer


def _await_line(
    process: subprocess.Popen[bytes], deadline: Deadline, has_spent: Callable[[], bool]
) -> str | None:
    """Return the process's next line, a JSON string; None at the deadline, or once it has spent.

    Raises:
        RuntimeFailure: the process has ended, or is stopped.
    """
    assert process.stdout is not None  # noqa: S101  # it was started with pipes
    pipe, line = process.stdout.fileno(), b""
    while not line.endswith(b"\n"):
        if not await_helper(process.pid, partial(readable, pipe), deadline, has_spent):
            return None
        data = os.read(pipe, READ_BYTES)
        if not data:
            raise RuntimeFailure("the process that checks grammars is gone")
        line += data
    return str(json.loads(line))
