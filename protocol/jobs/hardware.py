"""Devices that MLX and CoreML find on this machine, for `ssd doctor`."""

import msgspec


class HardwareReport(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `python -m services.tools.hardware`: one line of JSON."""

    mlx: str
    """Version of MLX."""
    device: str
    """MLX's device: cpu, metal or cuda."""
    device_name: str
    device_memory_bytes: int
    """Memory limit of the device; 0 if MLX does not report it."""
    devices: int
    """Number of devices."""
    matrix_kernels: str
    """Implementation of matrix products on a CPU; empty elsewhere."""
    read_bytes_s: float = 0.0
    """Memory bandwidth of weights, measured by a product of a vector with a matrix larger than
    any cache, as in decoding.
    """
    tolerances: dict[str, float] = {}
    """Relative difference from the usual result that self-tests allow, by operation."""
    coreml: str
    """Version of coremltools; empty if it is not installed."""
    coreml_units: list[str] = []
    """CoreML's devices: "cpu", "gpu", "Neural Engine (16 cores)"; macOS only."""
