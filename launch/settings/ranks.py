"""The machines and processes of a spread target: `--target-ranks`, `--hosts`, `--split`.

The hosts file has the format of `mlx.launch`, which `mlx.distributed_config` writes.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from launch.settings.machine import child_environment, has_cuda
from launch.settings.settings import StackSettings
from protocol.errors import UsageError
from protocol.settings import (
    RANK_BACKENDS,
    Device,
    RankBackend,
    RankGroupSettings,
    RankHost,
    RankSplit,
)

_HOST_S = 30.0
"""Longest wait for a host's first message; the whole start must be shorter than its own limit."""
_MEET_S: dict[RankBackend, float] = {"ring": 30.0, "jaccl": 30.0, "jaccl-ring": 30.0, "nccl": 90.0}
"""Longest wait for all ranks to connect. Those on CUDA load its libraries meanwhile, and NCCL
inspects the machine.
"""
_LOCAL = frozenset({"127.0.0.1", "localhost"})
_MLX_VARIABLES = ("MLX_ENABLE_CACHE_THRASHING_CHECK", "MLX_CUDA_GRAPH_CACHE_SIZE")
_GPU_VARIABLES = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")


class _Host(msgspec.Struct, frozen=True):
    """An entry of the file; other programs may use further keys."""

    # Must not be parsed by ssh as an option.
    ssh: Annotated[str, msgspec.Meta(pattern=r"^[^-\s]\S*$")]
    ips: list[str] = []
    rdma: list[str | list[str] | None] = []


class _HostsFile(msgspec.Struct, frozen=True):
    hosts: list[_Host]
    backend: str = ""
    envs: list[str] = []


def rank_group(settings: StackSettings, cores: Sequence[int] = ()) -> RankGroupSettings | None:
    """Return the group of ranks in the settings; None if the target is one process.

    The ranks on this machine share the `cores`, or are not pinned if there are too few: ranks wait
    for each other, and two on one core would do so twice per layer.

    Raises:
        UsageError: the settings are contradictory, or the file cannot be used.
    """
    split = _read_split(settings.split)
    if settings.hosts:
        if settings.target_ranks != 1:
            raise UsageError("--hosts names one host per rank; leave out --target-ranks")
        file = _read_hosts(Path(settings.hosts).expanduser())
    elif settings.target_ranks > 1:
        file = _HostsFile([_Host("127.0.0.1") for _ in range(settings.target_ranks)])
    elif split or settings.backend:
        raise UsageError("--split and --backend need --target-ranks or --hosts")
    else:
        return None
    if isinstance(split, list) and split and len(split) != len(file.hosts):
        raise UsageError(f"--split has {len(split)} numbers for {len(file.hosts)} ranks")
    backend = _backend(settings.backend or file.backend, settings.target_device)
    if split and backend == "nccl":
        raise UsageError("--split needs another --backend: MLX cannot pipeline over nccl")
    gpus = _gpus(settings.target_device) if _on_cuda(settings, backend) else None
    return RankGroupSettings(
        hosts=_share_cores(_hosts(file, gpus), cores),
        backend=backend,
        split=split,
        python=settings.rank_python,
        environment={**_mlx_variables(), **_variables(file.envs)},
        port=settings.rank_port,
        start_timeout_s=min(_HOST_S, settings.start_timeout_s / 2),
        meet_timeout_s=min(_MEET_S[backend], settings.start_timeout_s / 2),
        silence_timeout_s=settings.rank_timeout_s,
    )


def _read_split(text: str) -> RankSplit:
    if text == "auto":
        return "auto"
    try:
        split = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        split = [0]
    if any(layers < 1 for layers in split):
        raise UsageError(f"--split takes layers per rank, as in 20,12, or auto; not {text!r}")
    return split


def _read_hosts(path: Path) -> _HostsFile:
    try:
        content = msgspec.json.decode(path.read_bytes())
        keyed = content if isinstance(content, dict) else {"hosts": content}
        file = msgspec.convert(keyed, _HostsFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"the hosts file {str(path)!r} cannot be used: {error}") from error
    if len(file.hosts) < 2:
        raise UsageError(f"the hosts file {str(path)!r} names fewer than two hosts")
    return file


def _on_cuda(settings: StackSettings, backend: RankBackend) -> bool:
    return backend == "nccl" or (has_cuda() and settings.target_device != "cpu")


def _backend(name: str, device: Device) -> RankBackend:
    if not name:
        return "nccl" if has_cuda() and device != "cpu" else "ring"
    if name == "nccl" and device == "cpu":
        raise UsageError("--backend nccl needs a target on GPUs, and --target-device is cpu")
    for backend in RANK_BACKENDS:
        if name == backend:
            return backend
    raise UsageError(f"there is no backend {name!r}; choose one of {', '.join(RANK_BACKENDS)}")


def _gpus(device: Device) -> Iterator[dict[str, str]]:
    """Yield the variables that expose one GPU to each rank of this machine, from the target's
    on.
    """
    first = int(device.removeprefix("cuda:")) if device.startswith("cuda:") else 0
    for number in itertools.count(first):
        environment = child_environment(f"cuda:{number}")
        yield {name: environment[name] for name in _GPU_VARIABLES}


def _hosts(file: _HostsFile, gpus: Iterator[dict[str, str]] | None) -> list[RankHost]:
    """Return the ranks; the first one is here, whatever the file calls this machine."""
    hosts = []
    for rank, host in enumerate(file.hosts):
        is_local = rank == 0 or host.ssh in _LOCAL
        variables = next(gpus) if gpus is not None and is_local else {}
        hosts.append(
            RankHost(
                name=host.ssh,
                is_local=is_local,
                ips=host.ips,
                rdma=host.rdma,
                environment=variables,
            )
        )
    return hosts


def _share_cores(hosts: list[RankHost], cores: Sequence[int]) -> list[RankHost]:
    local = [rank for rank, host in enumerate(hosts) if host.is_local]
    if len(cores) < len(local):
        return hosts
    shares = {rank: list(cores[place :: len(local)]) for place, rank in enumerate(local)}
    return [
        msgspec.structs.replace(host, cores=shares.get(rank, [])) for rank, host in enumerate(hosts)
    ]


def _mlx_variables() -> dict[str, str]:
    """Return the environment variables of our children for those on other machines."""
    environment = child_environment("")
    return {name: environment[name] for name in _MLX_VARIABLES}


def _variables(lines: list[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for line in lines:
        name, separator, value = line.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(f"the hosts file has {line!r} among its envs, not NAME=VALUE")
        variables[name] = value
    return variables
