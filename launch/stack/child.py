"""A child process: started by module name, bound to us by a lifeline, logged to a file."""

import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Collection
from pathlib import Path

from launch.settings.machine import child_environment, module_command
from protocol.process.child import find_error
from protocol.settings import (
    ChildSettings,
    DrafterSettings,
    ServiceSettings,
    VerifierSettings,
    encode_settings,
)

_KILL_S = 5.0

_SILENT = "; it has not said Hello: does it speak the line protocol (--draft-lines)?"


class Child:
    """A child of the supervisor.

    The child inherits the read end of a pipe whose write end only we hold. However we die, the pipe
    closes and the child ends itself.
    """

    hint = ""
    """Possible cause of a long start."""

    def __init__(self, role: str, module: str, settings: ChildSettings, log: Path) -> None:
        self.role = role
        if isinstance(settings, DrafterSettings) and settings.command and not settings.lines:
            self.hint = _SILENT
        self.log = log
        self._killed_because = ""
        self._shutdown_s = settings.shutdown_timeout_s
        command = [*module_command(module), encode_settings(settings)]
        with log.open("ab") as output:
            self._log_start = output.tell()  # its own errors follow
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=settings.descriptors,
                env=environment_for(settings),
                start_new_session=True,  # Ctrl-C is for the supervisor only
            )

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self.process.poll()

    def last_words(self) -> str:
        """Return why it ended: our reason, its error sentence, or its exit status."""
        if self._killed_because:
            return self._killed_because
        with contextlib.suppress(OSError):
            output = self.log.read_bytes()[self._log_start :].decode(errors="replace")
            if sentence := find_error(output):
                return sentence
        code = self.exit_code
        if code is not None and code < 0:
            return f"the {self.role} was killed by signal {-code}"
        return f"the {self.role} ended with exit code {code}"

    def kill(self, reason: str) -> None:
        """Kill it, because it would not end by itself; `reason` is reported as its end."""
        self._killed_because = reason
        self._kill()

    def kill_group(self) -> None:
        """Kill its remaining processes: stopped ones do not end by themselves."""
        # No process is left, or only zombies (macOS).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def ask_to_end(self) -> None:
        """Request the end by SIGTERM."""
        if self.exit_code is None:
            self.process.terminate()

    def end(self) -> None:
        """Wait for the end, then force it, and reap."""
        try:
            self.process.wait(self._shutdown_s)
        except subprocess.TimeoutExpired:
            self._kill()
        else:
            self.kill_group()

    def _kill(self) -> None:
        self.process.kill()
        self.kill_group()
        # The system may take long to reclaim its memory; the other children must not wait.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILL_S)


_ONE_GRAPH = {"MLX_MAX_MB_PER_BUFFER": "1000000", "MLX_MAX_OPS_PER_BUFFER": "100000"}
"""One CUDA graph for each pass. CUDA instantiates a graph only when the device is idle: in the
middle of a pass whose first kernel waits for the host, that is when this kernel gives up.
"""


def environment_for(settings: ChildSettings) -> dict[str, str]:
    """Return the child's environment, which determines the visible GPUs."""
    device = settings.device if isinstance(settings, ServiceSettings) else ""
    if not isinstance(settings, VerifierSettings):
        return child_environment(device)
    ranks = settings.ranks.hosts[0].environment if settings.ranks else {}
    first = _ONE_GRAPH if settings.prelaunches else {}
    return {**first, **child_environment(device), **ranks}


def end_all(children: Collection[Child]) -> None:
    """End these children in an orderly way, concurrently."""
    for child in children:
        child.ask_to_end()
    for child in children:
        child.end()


def kill_all(children: Collection[Child]) -> None:
    """Kill these children; any waiting thread continues."""
    for child in children:
        child.process.kill()
        child.kill_group()


class RestartBudget:
    """At most `restarts` within any `window_s` seconds."""

    def __init__(self, restarts: int, window_s: float) -> None:
        self._restarts = restarts
        self._window_s = window_s
        self._times: deque[float] = deque()
        self.used = 0
        """Number of restarts so far."""

    def spend(self, now: float) -> bool:
        """Take one restart; return False if the budget is spent."""
        while self._times and now - self._times[0] > self._window_s:
            self._times.popleft()
        if len(self._times) >= self._restarts:
            return False
        self._times.append(now)
        self.used += 1
        return True


class Lifeline:
    """The pipe that binds all children to the life of one supervisor."""

    def __init__(self) -> None:
        self.child_end, self._own_end = os.pipe()
        self._open = True

    def close(self) -> None:
        """Close the pipe: running children end themselves; safe to call twice."""
        if self._open:
            self._open = False  # the descriptors may be reused
            os.close(self.child_end)
            os.close(self._own_end)
