"""The faults: each is done to a running stack, and undone where it would not pass by itself."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from launch.stack.control import ask_supervisor
from launch.stack.run_dir import RunDir
from protocol.errors import SsdError
from protocol.messages import (
    ChatMessage,
    FromOrchestrator,
    Generate,
    ProcessStatus,
    Stack,
    StackRequest,
    SwapDrafter,
)
from protocol.transport.channel import Channel
from protocol.transport.codec import Decoder
from tests.chaos.http_client import malform, never_reads
from tests.support import hostile_drafter

_REPLY_S = 10.0
_HOSTILE_S = 0.4
ROLES = ("orchestrator", "verifier", "drafter")


class Victim:
    """The stack that the faults happen to."""

    def __init__(self, run_dir: RunDir, dice: random.Random, url: str = "") -> None:
        """`url`: where its gateway is, if it has one."""
        self.run_dir = run_dir
        self.dice = dice
        self.url = url

    @property
    def roles(self) -> tuple[str, ...]:
        """What belongs to it when it is whole."""
        return (*ROLES, "gateway") if self.url else ROLES

    def processes(self) -> dict[str, ProcessStatus]:
        """Its processes by role; empty if the supervisor is busy."""
        try:
            reply = ask_supervisor(self.run_dir.path.name, StackRequest(), _REPLY_S)
        except SsdError:
            return {}
        return {p.role: p for p in reply.processes} if isinstance(reply, Stack) else {}

    def signal(self, role: str, number: signal.Signals) -> None:
        """Send a signal to the process of this role, if it is there."""
        process = self.processes().get(role)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _signal(role: str, number: signal.Signals) -> Callable[[Victim], None]:
    return lambda victim: victim.signal(role, number)


def _pause(role: str) -> Callable[[Victim], None]:
    def inject(victim: Victim) -> None:
        victim.signal(role, signal.SIGSTOP)
        time.sleep(victim.dice.uniform(0.02, 0.6))
        victim.signal(role, signal.SIGCONT)

    return inject


def _hostile(behaviour: str) -> Callable[[Victim], None]:
    def inject(victim: Victim) -> None:
        address = victim.run_dir.services_address
        seed = victim.dice.randrange(2**31)
        program = [sys.executable, "-P", hostile_drafter.__file__]
        subprocess.run(
            [*program, behaviour, address, str(seed), str(_HOSTILE_S)],
            check=False,
            timeout=60,
            stderr=subprocess.DEVNULL,
        )

    return inject


def _unlink(name: str) -> Callable[[Victim], None]:
    return lambda victim: (victim.run_dir.path / name).unlink(missing_ok=True)


def _folder_deleted(victim: Victim) -> None:
    shutil.rmtree(victim.run_dir.path, ignore_errors=True)


@contextlib.contextmanager
def _limit(victim: Victim, roles: tuple[str, ...], kind: int, limit: int) -> Iterator[None]:
    """Lower the soft limit of these processes for a while (Linux)."""
    held: list[tuple[psutil.Process, tuple[int, int]]] = []
    for role, status in victim.processes().items():
        if role not in roles:
            continue
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(status.pid)
            soft, hard = process.rlimit(kind)
            used = process.memory_info().vms if kind == psutil.RLIMIT_AS else 0
            process.rlimit(kind, (used + limit, hard))
            held.append((process, (soft, hard)))
    try:
        yield
    finally:
        for process, limits in held:
            with contextlib.suppress(psutil.Error):
                process.rlimit(kind, limits)


def _disk_full(victim: Victim) -> None:
    """No process can write to a file any more, such as its log; errors are provoked meanwhile."""
    with _limit(victim, ROLES, psutil.RLIMIT_FSIZE, 0):
        _hostile("garbage")(victim)
        _client_garbage(victim)


def _memory_short(victim: Victim) -> None:
    with _limit(victim, ("drafter",), psutil.RLIMIT_AS, 65536):
        time.sleep(victim.dice.uniform(0.1, 0.6))


def _client_garbage(victim: Victim) -> None:
    with _stranger(victim) as channel:
        for _ in range(20):
            channel.send_bytes(victim.dice.randbytes(victim.dice.randrange(200)))


def _client_vanishes(victim: Victim) -> None:
    with _stranger(victim) as channel:
        channel.send(Generate(request=1, tokens=[5, 6, 7], max_tokens=400))
        channel.ready(0.05)


def _client_never_reads(victim: Victim) -> None:
    with _stranger(victim) as channel:
        channel.send(Generate(request=1, tokens=[5, 6, 7], max_tokens=400))
        time.sleep(0.5)


def _stranger(victim: Victim) -> Channel[FromOrchestrator]:
    return Channel(victim.run_dir.clients_address, Decoder(FromOrchestrator))


def _swap(victim: Victim) -> None:
    """To the drafter without a model and back."""
    before = victim.processes().get("drafter")
    back = SwapDrafter(backend=before.backend, model=before.model) if before else None
    for message in (SwapDrafter(backend="ngram"), back):
        if message is not None:
            with contextlib.suppress(SsdError):  # refused while another fault is not over
                ask_supervisor(victim.run_dir.path.name, message, 60.0)


@dataclass(frozen=True)
class Fault:
    """One class of faults."""

    name: str
    inject: Callable[[Victim], None]
    replaces: str = ""
    """The role whose process it ends: the stack is whole again with another one."""


def _http_malformed(victim: Victim) -> None:
    malform(victim.url, victim.dice)


def _http_never_reads(victim: Victim) -> None:
    words = [ChatMessage("user", "Tell me everything.")]
    question = Generate(request=1, messages=words, max_tokens=400)
    never_reads(victim.url, question, victim.dice.uniform(0.2, 1.0))


def list_faults(victim: Victim) -> list[Fault]:
    """All classes that can happen to this stack on this system."""
    faults = [
        Fault(f"{name} {role}", _signal(role, number), replaces=role)
        for role in victim.roles
        for name, number in (
            ("SIGKILL", signal.SIGKILL),
            ("SIGTERM", signal.SIGTERM),
            ("SIGSTOP for good,", signal.SIGSTOP),
        )
    ]
    faults += [Fault(f"SIGSTOP and SIGCONT {role}", _pause(role)) for role in victim.roles]
    faults += [
        Fault(f"drafter {behaviour}", _hostile(behaviour))
        for behaviour in hostile_drafter.BY_SOCKET
    ]
    faults += [
        Fault("socket of services deleted", _unlink("services.sock")),
        Fault("socket of clients deleted", _unlink("clients.sock")),
        Fault("control socket deleted", _unlink("control.sock")),
        Fault("run folder deleted", _folder_deleted),
        Fault("drafter swapped", _swap),
        Fault("client sends garbage", _client_garbage),
        Fault("client vanishes", _client_vanishes),
        Fault("client never reads", _client_never_reads),
    ]
    if victim.url:
        faults.append(Fault("HTTP that is malformed", _http_malformed))
        faults.append(Fault("HTTP client never reads", _http_never_reads))
    if sys.platform == "linux":
        faults += [Fault("disk full", _disk_full), Fault("drafter out of memory", _memory_short)]
    return faults
