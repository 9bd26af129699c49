"""Probes as the door sees them: started, alone or two at a time, and listened to."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from launch.stack.child import Lifeline
from protocol.jobs.coreml_probe import ProbeResult, ProbeSettings
from protocol.process.child import ERROR_PREFIX
from protocol.settings import encode_settings

_LONGEST_S = 1800.0
"""The first load of a large model compiles for minutes."""


class Probe:
    """One probe in a process of its own."""

    def __init__(self, lifeline: Lifeline, **told: Any) -> None:
        self.settings = ProbeSettings(lifeline=lifeline.child_end, **told)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.coreml.probe", encode_settings(self.settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(lifeline.child_end, *(self.settings.barrier or ())),
        )

    def found(self) -> ProbeResult:
        """What it found; if it died or hung, a `ProbeResult` that says so."""
        try:
            out, errors = self._process.communicate(timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return self._failure(f"it did not end within {_LONGEST_S:g} s")
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if self._process.returncode == 0 and lines:
            return msgspec.json.decode(lines[-1], type=ProbeResult)
        sentences = [line for line in errors.splitlines() if line.startswith(ERROR_PREFIX)]
        ending = f"it ended with exit code {self._process.returncode}"
        return self._failure((sentences or [ending])[-1].removeprefix(ERROR_PREFIX))

    def _failure(self, reason: str) -> ProbeResult:
        units = self.settings.compute_units
        return ProbeResult(kind=self.settings.kind, compute_units=units, failed=reason)

    def close(self) -> None:
        """End it, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def probe(lifeline: Lifeline, **told: Any) -> Iterator[Probe]:
    """A probe that ends with the block."""
    started = Probe(lifeline, **told)
    try:
        yield started
    finally:
        started.close()


@contextlib.contextmanager
def probes_together(lifeline: Lifeline, *told: dict[str, Any]) -> Iterator[list[Probe]]:
    """Loops that begin when all of them are ready; one that dies keeps nobody waiting."""
    with contextlib.ExitStack() as stack:
        barrier = os.pipe()
        try:
            started = [stack.enter_context(probe(lifeline, barrier=barrier, **one)) for one in told]
        finally:
            for end in barrier:
                os.close(end)
        yield started
