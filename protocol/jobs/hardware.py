"""Devices that MLX and CoreML find on this machine, for `ssd doctor`."""

import msgspec


class HardwareReport(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON from `python -m services.tools.hardware`."""

    mlx: str
    """Version of MLX."""
    device: str
    """Where MLX computes: cpu, metal or cuda."""
    device_name: str
    device_memory_bytes: int
    """What the device may hold; 0 if MLX does not say."""
    devices: int
    """How many of them."""
    matrix_kernels: str
    """What multiplies matrices on a CPU; empty elsewhere."""
    read_bytes_s: float = 0.0
    """How fast weights are read: by a product of a matrix, larger than any cache, with a
    vector, which is what decoding does."""
    coreml: str
    """Version of coremltools; empty if it is not installed."""
    coreml_units: list[str] = []
    """What CoreML can compute on: "cpu", "gpu", "Neural Engine (16 cores)"; on macOS alone."""
