"""The machine and the versions behind the figures."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from launch.bench.result import Hardware
from launch.settings.machine import package_versions
from protocol.version import DISTRIBUTION, VERSION

_LIBRARIES = ("mlx", "mlx-lm", "mkl", "numpy", "pyzmq", "coremltools")
_TIMEOUT_S = 10.0


def hardware(units: dict[str, str]) -> Hardware:
    """Describe this machine; `units` is the device of each role."""
    return Hardware(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=psutil.cpu_count() or 1,
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        gpus=_run_tool("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"),
        units=units,
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that affect the speed."""
    libraries = {name: v for name, v in package_versions(_LIBRARIES).items() if v}
    return {"python": platform.python_version(), DISTRIBUTION: VERSION, **libraries}


def _processor() -> str:
    if sys.platform == "darwin":
        return " ".join(_run_tool("sysctl", "-n", "machdep.cpu.brand_string"))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _run_tool(*command: str) -> list[str]:
    """Return the lines that a system tool prints; none if it is not available."""
    tool = shutil.which(command[0])
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, *command[1:]], capture_output=True, text=True,
                              timeout=_TIMEOUT_S, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
