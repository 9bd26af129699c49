"""Supervisors that are killed: what of their stacks is left?"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

import psutil

from launch.stack.run_dir import RunDir, sweep

_LATEST_S = 4.0
"""A supervisor dies at a random moment of this span: while it starts, or after."""
_TIMEOUT_S = 15.0
_LAUNCH = (sys.executable, "-P", "-m", "launch.cli", "launch", "--name")


@dataclass
class Deaths:
    """What became of the killed stacks."""

    killed: int = 0
    gone_s: list[float] = field(default_factory=list)
    """Until the last child had ended."""
    left: list[str] = field(default_factory=list)


def kill_supervisors(count: int, flags: list[str], dice: random.Random) -> Deaths:
    """Start `ssd launch` with these flags so many times, and SIGKILL it at a random moment."""
    deaths = Deaths()
    for number in range(count):
        name = f"chaos-{os.getpid()}-{number}"
        process = subprocess.Popen(
            [*_LAUNCH, name, *flags], stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(dice.uniform(0.0, _LATEST_S))
        children = psutil.Process(process.pid).children(recursive=True)
        with contextlib.suppress(psutil.Error):
            if children and dice.random() < 0.3:
                dice.choice(children).suspend()  # it will not notice by itself
        started = time.monotonic()
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=_TIMEOUT_S)
        sweep()  # as the next start would: a supervisor may die before it has any child
        alive = [child for child in alive if _lives(child)]
        deaths.killed += 1
        deaths.gone_s.append(time.monotonic() - started)
        deaths.left += [f"process {child.pid}" for child in alive]
        if RunDir(name).path.exists():
            deaths.left.append(str(RunDir(name).path))
    return deaths


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
