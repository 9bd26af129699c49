"""This machine: its cores, who gets which, and the environment of a child on a device."""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from launch.settings.paths import cache_dir
from protocol.errors import UsageError
from protocol.settings import BackendName, Device
from protocol.version import install_hint

_CUDA = "cuda:"
_GPUS = Path("/proc/driver/nvidia/gpus")
_CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12")
# MLX on CUDA keeps 400 graphs, and gives up for good after 800 that were new, however long
# that took; verifications of all lengths and trees of all widths are many more.
_MLX_ON_CUDA = {"MLX_ENABLE_CACHE_THRASHING_CHECK": "0", "MLX_CUDA_GRAPH_CACHE_SIZE": "2000"}


def child_environment(device: Device) -> dict[str, str]:
    """The environment of a child bound to this device.

    CUDA has no other way to keep a process off a GPU than not to show it.

    Raises:
        UsageError: the GPU is not among those that we ourselves may see.
    """
    own = {**_MLX_ON_CUDA, **_place_kernels(), **os.environ}
    if not device.startswith(_CUDA):
        return own
    index = int(device.removeprefix(_CUDA))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = [str(index)] if visible is None else visible.split(",")[index : index + 1]
    if not shown:
        raise UsageError(f"no device {device}: CUDA_VISIBLE_DEVICES is {visible!r}")
    # By bus, as nvidia-smi counts, not by speed, as CUDA does if left alone.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **own}
    return {**order, "CUDA_VISIBLE_DEVICES": shown[0]}


def _place_kernels() -> dict[str, str]:
    """Where MLX on CUDA keeps compiled kernels: not where everybody may write, and for longer.

    A kernel takes seconds to compile, and its name says neither for which MLX it is nor for which
    GPU. Where that is not clear, or there are several kinds, MLX's own folder stays.
    """
    version, models = package_versions(["mlx"])["mlx"], _gpu_models()
    if not has_cuda() or not version or len(models) != 1:
        return {}
    folder = cache_dir().absolute() / "kernels" / f"{version}-{models[0]}"
    return {"MLX_PTX_CACHE_DIR": str(folder)}


def _gpu_models() -> list[str]:
    """NVIDIA's GPUs of this machine, as parts of a file's name; one of each kind."""
    found = set[str]()
    for file in _GPUS.glob("*/information"):
        with contextlib.suppress(OSError):
            lines = file.read_text("utf-8", "replace").splitlines()
            models = [line.partition(":")[2] for line in lines if line.startswith("Model:")]
            found |= {re.sub(r"\W+", "_", model.strip()) for model in models}
    return sorted(found)


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Name of a distribution -> its version; empty if it is not installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def has_cuda() -> bool:
    """Whether MLX is installed with its CUDA backend."""
    return any(package_versions(_CUDA_PACKAGES).values())


def computes_on_cpu(device: Device) -> bool:
    """Whether MLX would compute there if told to use this device; "" is its own choice."""
    return device == "cpu" or (not device and sys.platform != "darwin" and not has_cuda())


def require_mlx() -> None:
    """Raise UsageError, naming the extra to install, if MLX is missing (on Linux it is one)."""
    if importlib.util.find_spec("mlx") is None or importlib.util.find_spec("mlx.core") is None:
        raise UsageError(
            f"MLX is not installed: {install_hint('cpu')}, or {install_hint('cuda')} with CUDA 13"
        )


def compute_threads() -> int:
    """Threads for a compute process that may use every core that we may."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Cores(msgspec.Struct, frozen=True):
    """Which cores each compute process gets; empty leaves it free."""

    verifier: list[int]
    drafter: list[int]


def share_cores(backend: BackendName) -> Cores:
    """On Linux, disjoint cores: target and drafter must not wait for each other.

    The drafter gets a quarter, at least one. A single core cannot be shared out.
    """
    if not hasattr(os, "sched_getaffinity"):
        return Cores([], [])
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or backend in {"ngram", "remote"}:
        return Cores(cores[:1], cores[1:2]) if len(cores) == 2 else Cores(cores[:-1], cores[-1:])
    drafting = max(1, len(cores) // 4)
    return Cores(cores[:-drafting], cores[-drafting:])


def extend_environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with more variables, for another program."""
    return {**os.environ, **more}
