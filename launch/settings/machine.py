"""This machine: its cores, their distribution, and the environment of a child on a device."""

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
# MLX on CUDA keeps 400 graphs, and permanently fails after 800 new ones, over any time;
# verifications of all lengths and trees of all widths need many more.
_MLX_ON_CUDA = {"MLX_ENABLE_CACHE_THRASHING_CHECK": "0", "MLX_CUDA_GRAPH_CACHE_SIZE": "2000"}


def child_environment(device: Device) -> dict[str, str]:
    """Return the environment of a child bound to this device.

    On CUDA, hiding a GPU is the only way to keep a process off it.

    Raises:
        UsageError: the GPU is not visible to this process.
    """
    environment = {**_MLX_ON_CUDA, **_place_kernels(), **os.environ}
    if not device.startswith(_CUDA):
        return environment
    index = int(device.removeprefix(_CUDA))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = [str(index)] if visible is None else visible.split(",")[index : index + 1]
    if not shown:
        raise UsageError(f"no device {device}: CUDA_VISIBLE_DEVICES is {visible!r}")
    # By bus, like nvidia-smi, not by speed, which is CUDA's default.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **environment}
    return {**order, "CUDA_VISIBLE_DEVICES": shown[0]}


def _place_kernels() -> dict[str, str]:
    """Return where MLX on CUDA keeps compiled kernels: in a private and permanent folder.

    A kernel takes seconds to compile, and its name identifies neither the MLX version nor the GPU.
    If these are unknown, or there are several kinds, MLX's own folder is used.
    """
    version, models = package_versions(["mlx"])["mlx"], _gpu_models()
    if not has_cuda() or not version or len(models) != 1:
        return {}
    folder = cache_dir().absolute() / "kernels" / f"{version}-{models[0]}"
    return {"MLX_PTX_CACHE_DIR": str(folder)}


def _gpu_models() -> list[str]:
    """Return NVIDIA's GPU models of this machine, as parts of a file name; one of each kind."""
    gpu_names = set[str]()
    for file in _GPUS.glob("*/information"):
        with contextlib.suppress(OSError):
            lines = file.read_text("utf-8", "replace").splitlines()
            models = [line.partition(":")[2] for line in lines if line.startswith("Model:")]
            gpu_names |= {re.sub(r"\W+", "_", model.strip()) for model in models}
    return sorted(gpu_names)


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions by distribution name; empty if one is not installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def has_cuda() -> bool:
    """Return True if MLX is installed with its CUDA backend."""
    return any(package_versions(_CUDA_PACKAGES).values())


def computes_on_cpu(device: Device) -> bool:
    """Return True if MLX would compute on the CPU with this device; "" is its default."""
    return device == "cpu" or (not device and sys.platform != "darwin" and not has_cuda())


def require_mlx() -> None:
    """Raise UsageError, naming the extra to install, if MLX is missing (an extra on Linux)."""
    if importlib.util.find_spec("mlx") is None or importlib.util.find_spec("mlx.core") is None:
        raise UsageError(
            f"MLX is not installed: {install_hint('cpu')}, or {install_hint('cuda')} with CUDA 13"
        )


def compute_threads() -> int:
    """Return the threads of a process that may use every available core."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Cores(msgspec.Struct, frozen=True):
    """The cores of each compute process; empty: not pinned."""

    verifier: list[int]
    drafter: list[int]


def share_cores(backend: BackendName) -> Cores:
    """Assign disjoint cores on Linux: target and drafter must not wait for each other.

    The drafter gets a quarter, at least one. A single core cannot be divided.
    """
    if not hasattr(os, "sched_getaffinity"):
        return Cores([], [])
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or backend in {"ngram", "remote"}:
        return Cores(cores[:1], cores[1:2]) if len(cores) == 2 else Cores(cores[:-1], cores[-1:])
    drafting = max(1, len(cores) // 4)
    return Cores(cores[:-drafting], cores[-drafting:])


def module_command(module: str) -> list[str]:
    """Return the command of one of our modules; its arguments follow."""
    # -P: a folder named `services` in the user's working directory must not shadow ours.
    return [sys.executable, "-P", "-m", module]


def extend_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with more variables, for another program."""
    return {**os.environ, **more}
