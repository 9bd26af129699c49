"""`python -m services.tools.hardware`: the hardware MLX finds, as one line of JSON."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

import msgspec

from protocol.jobs.hardware import HardwareReport
from services.kernels.cpu.library import load_blas
from services.mlx.lean_imports import leave_out_unused_libraries


def survey() -> HardwareReport:
    """Return the hardware MLX finds; takes as long as its import."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    load_blas(threads=len(cores))
    # MLX must be imported after the BLAS is in place.
    import mlx.core as mx  # noqa: PLC0415

    from services.mlx.loader import compute_unit  # noqa: PLC0415
    from services.mlx.reading import measure_reading  # noqa: PLC0415
    from services.mlx.selftest import TOLERANCES  # noqa: PLC0415

    device = compute_unit()
    module: Any = mx  # both functions lack type hints
    info: dict[str, Any] = module.device_info()
    return HardwareReport(
        mlx=importlib.metadata.version("mlx"),
        device=device,
        device_name=str(info.get("device_name", platform.machine())),
        device_memory_bytes=int(info.get("memory_size", info.get("total_memory", 0))),
        devices=1 if device == "cpu" else int(module.device_count(mx.gpu)),
        matrix_kernels=_matrix_kernels() if device == "cpu" else "",
        read_bytes_s=measure_reading(),
        tolerances=TOLERANCES,
        coreml=_version("coremltools"),
        coreml_units=_coreml_units(),
    )


def _matrix_kernels() -> str:
    """Return the library whose matrix products this process has loaded."""
    if sys.platform != "linux":
        return "Accelerate"
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    names = [name for name, library in _LIBRARIES.items() if library in maps]
    return " and ".join(names) or "MLX's reference BLAS (slow)"


_LIBRARIES = {"CPU kernels": "libssd_cpu_kernels", "MKL": "libmkl_rt"}


def _coreml_units() -> list[str]:
    """Return the devices CoreML lists; empty where CoreML is missing."""
    if sys.platform != "darwin" or not _version("coremltools"):
        return []
    try:
        # The import takes seconds, and lists nothing on other systems.
        from services.coreml.runtime.devices import units  # noqa: PLC0415

        return units()
    except (AttributeError, ImportError, RuntimeError, TypeError):
        return []


def _version(package: str) -> str:
    """Return the package's version without importing it; empty if it is not installed."""
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else ""


if __name__ == "__main__":
    leave_out_unused_libraries()
    sys.stdout.write(msgspec.json.encode(survey()).decode() + "\n")
