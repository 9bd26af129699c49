"""Two ranks of this machine with a slow link between them: every byte comes later by a delay.

`python docs/lab/slow_link.py --delay-ms 0.5 bench --target-ranks 2 --model FOLDER ...` runs `ssd
bench ...` with proxies in the ring's connections, which hold what they read for so long.
`ssd doctor` does not go through them: `ssd top` and `/health` show what the ranks themselves
measured. The proxies are Python and take some of the processors' time, with a delay of 0 too.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

import msgspec

from launch.cli import main as ssd
from launch.settings.ranks import rank_group
from launch.settings.settings import StackSettings
from launch.stack import spawn
from protocol.settings import RankGroupSettings
from services.ranks.environment import Ports

_START_S = 60.0


def pump(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
    """Read from one, and write to the other `delay_s` later, until an end closes."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def write() -> None:
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            if not data:
                sink.close()
                return
            try:
                sink.sendall(data)
            except OSError:
                return

    threading.Thread(target=write, daemon=True).start()
    data = b"-"
    while data:
        try:
            data = source.recv(1 << 20)
        except OSError:
            data = b""
        waiting.put((time.perf_counter() + delay_s, data))


def connect(port: int) -> socket.socket:
    """To a rank that may not listen yet."""
    until = time.monotonic() + _START_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def serve(listener: socket.socket, port: int, delay_s: float) -> None:
    """Lead everyone who comes to this port."""
    while True:
        near, _ = listener.accept()
        far = connect(port)
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((near, far), (far, near)):
            threading.Thread(target=pump, args=(*pair, delay_s), daemon=True).start()


def lead(listeners: Sequence[socket.socket], ports: Sequence[int], delay_s: float) -> None:
    """One proxy per rank, in a process of their own."""
    with contextlib.suppress(OSError):  # not without privileges
        # The ring's threads never sleep: whoever sleeps would wait for a core for milliseconds.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    for listener, port in zip(listeners, ports, strict=True):
        threading.Thread(target=serve, args=(listener, port, delay_s), daemon=True).start()
    threading.Event().wait()


def hosts_file(own: int, ports: Sequence[int], proxies: Sequence[int]) -> str:
    """What rank `own` takes for the addresses: its own, and the others' proxies."""
    addresses = [
        [f"127.0.0.1:{port if rank == own else proxy}"]
        for rank, (port, proxy) in enumerate(zip(ports, proxies, strict=True))
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(addresses, file)
    return file.name


def main() -> None:
    """Start the proxies, and `ssd` with a ring that goes through them."""
    parser = argparse.ArgumentParser(description="A slow link between the ranks.")
    parser.add_argument("--delay-ms", type=float, required=True)
    given, rest = parser.parse_known_args()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    proxies = [int(listener.getsockname()[1]) for listener in listeners]
    held = Ports(2)
    process = multiprocessing.Process(
        target=lead, args=(listeners, held.numbers, given.delay_ms / 1e3), daemon=True
    )
    process.start()
    files = [hosts_file(rank, held.numbers, proxies) for rank in range(2)]

    def through_proxies(
        settings: StackSettings, cores: Sequence[int] = ()
    ) -> RankGroupSettings | None:
        group = rank_group(settings, cores)
        if group is None:
            return None
        hosts = [
            msgspec.structs.replace(host, environment={"MLX_HOSTFILE": file})
            for host, file in zip(group.hosts, files, strict=True)
        ]
        return msgspec.structs.replace(group, hosts=hosts)

    vars(spawn)["rank_group"] = through_proxies
    sys.argv = ["ssd", *rest]
    ssd()


if __name__ == "__main__":
    main()
