"""The environment variables by which each backend of `mx.distributed` finds its ranks.

They are those that `mlx.launch` sets. MLX reads them when the group is formed, so every rank sets
its own before that.
"""

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from protocol.errors import UsageError
from protocol.process.closeable import Closeable
from protocol.settings import RankGroupSettings, RankHost


class Variables(NamedTuple):
    """Environment variables of one rank's process."""

    plain: dict[str, str]
    files: dict[str, str]
    """Variables that name files, and the contents of these files."""


class Ports(Closeable):
    """Loopback ports reserved for this process, on which MLX can still listen.

    A port that is bound without listening can be bound again with SO_REUSEADDR, as MLX does. For
    all others the port is taken, nor does the system assign it to those who ask for a free one.
    """

    def __init__(self, count: int) -> None:
        self._sockets: list[socket.socket] = []
        self.numbers: list[int] = []
        for _ in range(count):
            holder = socket.socket()
            self._sockets.append(holder)
            holder.bind(("127.0.0.1", 0))
            # Set after binding: two sockets that reuse addresses could get the same free port.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.numbers.append(int(holder.getsockname()[1]))

    def close(self) -> None:
        """Release the ports that MLX does not use; safe to call twice."""
        for holder in self._sockets:
            holder.close()
        self._sockets = []


def hold_ports(settings: RankGroupSettings) -> Ports:
    """Reserve the ports of ranks on this machine, to be held until the group is formed."""
    if not _on_loopback(settings):
        return Ports(0)
    return Ports(len(settings.hosts) if settings.backend == "ring" else 1)


def variables_of(settings: RankGroupSettings, ports: Ports) -> list[Variables]:
    """Return the variables of each rank.

    Raises:
        UsageError: the hosts lack what the backend needs.
    """
    hosts = settings.hosts
    match settings.backend:
        case "ring":
            plain, files = _ring(settings, ports.numbers)
        case "jaccl" | "jaccl-ring":
            plain, files = _jaccl(settings)
        case "nccl":
            plain, files = _nccl(settings, ports.numbers), {}
    own = [{**plain, **settings.environment, **host.environment} for host in hosts]
    return [
        Variables({**variables, "MLX_RANK": str(rank)}, files) for rank, variables in enumerate(own)
    ]


def _on_loopback(settings: RankGroupSettings) -> bool:
    return all(host.is_local for host in settings.hosts)


def _ring(
    settings: RankGroupSettings, free: Sequence[int]
) -> tuple[dict[str, str], dict[str, str]]:
    addresses = []
    for rank, host in enumerate(settings.hosts):
        if _on_loopback(settings):
            addresses.append([f"127.0.0.1:{free[rank]}"])
        else:
            addresses.append([f"{ip}:{settings.port + rank}" for ip in _ips(host, "ring")])
    return {}, {"MLX_HOSTFILE": json.dumps(addresses)}


def _nccl(settings: RankGroupSettings, free: Sequence[int]) -> dict[str, str]:
    ip, port = "127.0.0.1", settings.port
    if _on_loopback(settings):
        [port] = free
    else:
        ip = _ips(settings.hosts[0], "nccl")[0]
    return {
        "NCCL_HOST_IP": ip,
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


@contextlib.contextmanager
def export_variables(variables: Variables) -> Iterator[None]:
    """Set the variables in this process's environment; their files exist as long as the context."""
    with contextlib.ExitStack() as files:
        for name, content in variables.files.items():
            file = files.enter_context(tempfile.NamedTemporaryFile("w", prefix="ssd-ranks-"))
            file.write(content)
            file.flush()
            os.putenv(name, file.name)
        for name, value in variables.plain.items():
            os.putenv(name, value)
        yield
