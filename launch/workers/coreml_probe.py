"""Probes of CoreML: one at a time, or two that start together."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from launch.stack.child import Lifeline
from launch.workers.worker import JsonWorker
from protocol.errors import SsdError
from protocol.jobs.coreml_probe import ProbeResult, ProbeSettings

_TIMEOUT_S = 1800.0
"""The first load of a large model compiles for minutes."""


class ProbeWorker(JsonWorker):
    """One measurement in a separate process: drivers hang and crash."""

    def __init__(self, lifeline: Lifeline, **settings: Any) -> None:
        self.settings = ProbeSettings(lifeline=lifeline.child_end, **settings)
        barrier = self.settings.barrier or ()
        super().__init__("probe", "services.coreml.probe", self.settings, descriptors=barrier)

    def measure(self) -> ProbeResult:
        """Return the result; if the process died or hung, a `ProbeResult` with the reason."""
        try:
            return self.result(ProbeResult, _TIMEOUT_S)
        except SsdError as error:
            units = self.settings.compute_units
            return ProbeResult(kind=self.settings.kind, compute_units=units, failed=str(error))


@contextlib.contextmanager
def open_probes(lifeline: Lifeline, *settings: dict[str, Any]) -> Iterator[list[ProbeWorker]]:
    """Start loops together once all are ready; a dead one does not block the others."""
    with contextlib.ExitStack() as stack:
        barrier = os.pipe()
        try:
            workers = [
                stack.enter_context(ProbeWorker(lifeline, barrier=barrier, **probe_settings))
                for probe_settings in settings
            ]
        finally:
            for end in barrier:
                os.close(end)
        yield workers
