"""Devices that CoreML can compute on. macOS only."""

from typing import Any

from coremltools.models import compute_device

_NAMES = {"MLCPUComputeDevice": "cpu", "MLGPUComputeDevice": "gpu"}


def units() -> list[str]:
    """Return one word for each device that CoreML lists; the Neural Engine with its cores."""
    devices: list[Any] = compute_device.MLComputeDevice.get_all_compute_devices()
    return [_name(device) for device in devices]


def _name(device: Any) -> str:
    kind = type(device).__name__
    if kind == "MLNeuralEngineComputeDevice":
        return f"Neural Engine ({device.total_core_count} cores)"
    return _NAMES.get(kind, kind)
