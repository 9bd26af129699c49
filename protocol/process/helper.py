"""Waiting for a helper process: one that is stopped is given up soon, whatever it was asked."""

import contextlib
import signal
import subprocess
from collections.abc import Callable

import psutil

from protocol.errors import RuntimeFailure
from protocol.process.deadline import Deadline

LOOK_S = 0.1
_MOST_LOOKS = 10
"""In a row at which the helper is stopped: a shorter pause is no loss."""
_OWN_FAULT = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGPROF})


def await_helper(
    pid: int, is_ready: Callable[[float], bool], deadline: Deadline, spent: Callable[[], bool]
) -> bool:
    """Wait for an answer of the helper.

    Args:
        pid: of the helper.
        is_ready: whether the answer is there, after at most so many seconds.
        deadline: of the wait.
        spent: whether the helper has used up what it may take.

    Returns:
        Whether the answer is there; False at the deadline, or once everything is spent.

    Raises:
        RuntimeFailure: the helper is gone, or somebody stopped it.
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
    """Check if the system holds this process (SIGSTOP)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def has_broken_down(process: "subprocess.Popen[bytes]") -> bool:
    """Check if a helper that is gone broke down by itself: others do not send such signals."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LOOK_S)  # its pipes may be closed a moment before it is gone
    code = process.returncode
    return code is not None and (code >= 0 or -code in _OWN_FAULT)
