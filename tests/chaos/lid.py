"""`python -m tests.chaos.lid PID SECONDS`: stops a process and its children, then continues them.

As the lid of a laptop does: for none of them time goes by.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil

_SPARE_S = 60.0


def close_lid(seconds: float) -> None:
    """Stop this process with all its children, and continue them after so long."""
    command = [sys.executable, "-m", "tests.chaos.lid", str(os.getpid()), str(seconds)]
    subprocess.run(command, check=True, timeout=seconds + _SPARE_S)


def _stop(root: psutil.Process) -> list[psutil.Process]:
    """Stop parents before their children, so that none starts another meanwhile."""
    stopped: list[psutil.Process] = []
    while True:
        tree = [root, *root.children(recursive=True)]
        running = [one for one in tree if one not in stopped and one.pid != os.getpid()]
        if not running:
            return stopped
        for one in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGSTOP)
            stopped.append(one)


if __name__ == "__main__":
    stopped = _stop(psutil.Process(int(sys.argv[1])))
    try:
        time.sleep(float(sys.argv[2]))
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
