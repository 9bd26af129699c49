"""The variables by which each backend of `mx.distributed` finds its ranks.

The same ones as `mlx.launch` sets. MLX reads them when the group is formed, so every rank
sets its own before that.
"""

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from protocol.errors import UsageError
from protocol.settings import RankGroupSettings, RankHost


class Variables(NamedTuple):
    """What one rank's process needs in its environment."""

    plain: dict[str, str]
    files: dict[str, str]
    """Variables that name files, and the contents of these."""


def variables_of(settings: RankGroupSettings) -> list[Variables]:
    """The variables of each rank.

    Raises:
        UsageError: the hosts lack what the backend needs.
    """
    hosts = settings.hosts
    match settings.backend:
        case "ring":
            plain, files = _ring(settings)
        case "jaccl" | "jaccl-ring":
            plain, files = _jaccl(settings)
        case "nccl":
            plain, files = _nccl(settings), {}
    own = [{**plain, **settings.environment, **host.environment} for host in hosts]
    return [
        Variables({**variables, "MLX_RANK": str(rank)}, files) for rank, variables in enumerate(own)
    ]


def _ring(settings: RankGroupSettings) -> tuple[dict[str, str], dict[str, str]]:
    addresses = []
    on_loopback = all(host.is_local for host in settings.hosts)
    ports = free_ports(len(settings.hosts)) if on_loopback else []
    for rank, host in enumerate(settings.hosts):
        if on_loopback:
            addresses.append([f"127.0.0.1:{ports[rank]}"])
        else:
            addresses.append([f"{ip}:{settings.port + rank}" for ip in _ips(host, "ring")])
    return {}, {"MLX_HOSTFILE": json.dumps(addresses)}


def _nccl(settings: RankGroupSettings) -> dict[str, str]:
    first = settings.hosts[0]
    on_loopback = all(host.is_local for host in settings.hosts)
    port = free_ports(1)[0] if on_loopback else settings.port
    return {
        "NCCL_HOST_IP": "127.0.0.1" if on_loopback else _ips(first, "nccl")[0],
        "NCCL_PORT": str(port),
        "MLX_WORLD_SIZE": str(len(settings.hosts)),
    }


def _jaccl(settings: RankGroupSettings) -> tuple[dict[str, str], dict[str, str]]:
    count = len(settings.hosts)
    in_ring = settings.backend == "jaccl-ring"
    for rank, host in enumerate(settings.hosts):
        neighbours = {(rank - 1) % count, (rank + 1) % count} - {rank}
        needed = neighbours if in_ring else set(range(count)) - {rank}
        present = {peer for peer, device in enumerate(host.rdma) if device is not None}
        if len(host.rdma) != count or rank in present or not needed <= present:
            raise UsageError(
                f"jaccl needs in the hosts file, for {host.name!r}, one RDMA device per rank and "
                "null for itself (`mlx.distributed_config` writes such a file)"
            )
    ip = _ips(settings.hosts[0], "jaccl")[0]
    plain = {"MLX_JACCL_COORDINATOR": f"{ip}:{settings.port}"}
    if in_ring:
        plain["MLX_JACCL_RING"] = "1"
    return plain, {"MLX_IBV_DEVICES": json.dumps([host.rdma for host in settings.hosts])}


def _ips(host: RankHost, backend: str) -> Sequence[str]:
    if not host.ips:
        raise UsageError(f"{backend} needs an address: the host {host.name!r} has no `ips`")
    return host.ips


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextlib.contextmanager
def export_variables(variables: Variables) -> Iterator[None]:
    """Put the variables into this process's environment; their files last as long as this."""
    with contextlib.ExitStack() as files:
        for name, content in variables.files.items():
            file = files.enter_context(tempfile.NamedTemporaryFile("w", prefix="ssd-ranks-"))
            file.write(content)
            file.flush()
            os.putenv(name, file.name)
        for name, value in variables.plain.items():
            os.putenv(name, value)
        yield
