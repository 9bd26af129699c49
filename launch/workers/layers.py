"""Asks a process with MLX for the state of a model's layers."""

import msgspec

from launch.workers.worker import run_module
from protocol.errors import SsdError
from protocol.jobs.layers import LayersReport

_TIMEOUT_S = 120.0


def describe_layers(folder: str) -> LayersReport:
    """Return the kinds of layers and how they roll back a rejected draft; else an error."""
    try:
        report = run_module("layer report", "services.tools.layers", folder, timeout_s=_TIMEOUT_S)
    except SsdError as error:
        return LayersReport(str(error))
    return msgspec.json.decode(report, type=LayersReport)
