"""Ask a process with MLX what a model's layers remember."""

import msgspec

from launch.workers.worker import run_module
from protocol.errors import SsdError
from protocol.jobs.layers import LayersReport

_TIMEOUT_S = 120.0


def describe_layers(folder: str) -> LayersReport:
    """The kinds of layers and how they go back after a rejected draft; else why nobody knows."""
    try:
        found = run_module("layer report", "services.tools.layers", folder, timeout_s=_TIMEOUT_S)
    except SsdError as error:
        return LayersReport(str(error))
    return msgspec.json.decode(found, type=LayersReport)
