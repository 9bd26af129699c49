"""The device on which MLX computes in this process. Import it after the BLAS is loaded."""

import mlx.core as mx

from protocol.errors import UsageError
from protocol.settings import Device
from services.mlx.loader import compute_unit

_KEPT_SHARE = 16
"""Fraction of the GPU's memory that MLX may cache: many times what a pass needs."""


def bind(device: Device) -> str:
    """Compute on this device from now on; return its name, for the handshake.

    For `cuda:N` the parent has restricted this process to that GPU
    (`launch.settings.machine.child_environment`), so that here it is the first one.

    Raises:
        UsageError: there is no such device.
    """
    if device == "cpu":
        mx.set_default_device(mx.cpu)
    elif device:
        if device != "gpu" and not mx.cuda.is_available():
            raise UsageError(f"there is no {device} here: this MLX is not built for CUDA")
        if not mx.device_count(mx.gpu):
            raise UsageError(f"there is no {device} here that MLX can use")
        mx.set_default_device(mx.gpu)
    if device.startswith("cuda:"):
        _try(device)
    unit = compute_unit()
    if unit == "cuda":
        _leave_memory_to_others()
    return device if device.startswith("cuda:") else unit


def _leave_memory_to_others() -> None:
    """Limit the memory that is cached for later use.

    By default MLX keeps all freed memory, up to the whole GPU: every buffer that a growing text has
    outgrown. Another process, such as a drafter, would then run out of memory.
    """
    if total := int(mx.device_info().get("total_memory", 0)):
        mx.set_cache_limit(total // _KEPT_SHARE)


def _try(device: Device) -> None:
    try:
        mx.eval(mx.ones(1) + 1)
    # The CUDA runtime's own errors, of any type that MLX raises.
    except Exception as error:
        raise UsageError(f"{device} cannot be used: {error}") from error
