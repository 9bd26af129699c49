"""Waits for a helper process, but not for long if the process is stopped."""

import contextlib
import signal
import subprocess
from collections.abc import Callable

import psutil

from protocol.errors import RuntimeFailure
from protocol.process.deadline import Deadline

LOOK_S = 0.1
_MOST_LOOKS = 10
"""Consecutive checks at which the helper is stopped; a shorter pause is tolerated."""
_OWN_FAULT = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGPROF})


def await_helper(
    pid: int, is_ready: Callable[[float], bool], deadline: Deadline, spent: Callable[[], bool]
) -> bool:
    """Wait for an answer of the helper.

    Args:
        pid: process id of the helper.
        is_ready: waits at most this many seconds; returns True if the answer is there.
        deadline: deadline of the wait.
        spent: returns True if the helper has used up its budget.

    Returns:
        True if the answer is there; False at the deadline, or once the budget is spent.

    Raises:
        RuntimeFailure: the helper has ended, or was stopped.
    """
    looks = 0
    while not is_ready(min(LOOK_S, deadline.remaining)):
        if deadline.passed or spent():
            return False
        looks = looks + 1 if is_stopped(pid) else 0
        if looks >= _MOST_LOOKS:
            raise RuntimeFailure("the helper process was stopped")
    return True


def is_stopped(pid: int) -> bool:
    """Return True if the process is stopped (SIGSTOP)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def has_broken_down(process: "subprocess.Popen[bytes]") -> bool:
    """Return True if a helper crashed by itself: other programs do not send such signals."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LOOK_S)  # its pipes may close a moment before it ends
    code = process.returncode
    return code is not None and (code >= 0 or -code in _OWN_FAULT)
