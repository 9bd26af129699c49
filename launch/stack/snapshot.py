"""The state of a running stack, from its supervisor, its orchestrator and the system."""

import time
from typing import Literal

import msgspec
import psutil

from launch.stack.control import ask_supervisor, list_models
from launch.stack.run_dir import RunDir
from protocol.client.client import Client
from protocol.errors import RuntimeFailure, SsdError, UsageError
from protocol.messages import ModelStatus, ProcessState, ProcessStatus, Stack, StackRequest, Status
from protocol.process.closeable import Closeable
from protocol.process.orphans import seconds_since

_ANSWER_S = 2.0
_SETTLE_S = 0.2
"""Interval of the first measurement of CPU use."""


class ProcessFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the stack, as reported by its supervisor and the system."""

    role: str
    pid: int
    state: ProcessState | Literal["stopped", "gone"]
    """`stopped` by a signal; `gone`: it has just ended."""
    restarts: int
    backend: str
    model: str
    device: str
    memory_bytes: int
    """Resident memory; shared memory is counted in each process."""
    cpu_percent: float
    """CPU use since the last observation; 100 is one core."""
    uptime_s: float


class StackSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A stack at one moment."""

    name: str
    at: float
    """Seconds since the epoch."""
    uptime_s: float
    processes: list[ProcessFigures]
    free_memory_bytes: int
    status: Status | None
    """The orchestrator's status; None if it does not answer."""
    problems: list[str]
    """Processes that did not answer, and why."""
    models: list[ModelStatus] = []
    """Models of a server of several models; each loaded one has a separate stack."""


class StackObserver(Closeable):
    """Observes the stack `name` repeatedly.

    Raises:
        UsageError: no such stack is running.
    """

    def __init__(self, name: str) -> None:
        self._run_dir = RunDir(name)
        self._name = name
        self._seen: dict[int, psutil.Process] = {}
        description = self._run_dir.running()
        if description is None:
            raise UsageError(f"no stack named {name!r} is running; start one with `ssd launch`")
        self._description = description
        self._client = Client(self._run_dir.clients_address)

    def first(self) -> StackSnapshot:
        """Return a first snapshot with a short CPU measurement between two observations."""
        self.look()
        time.sleep(_SETTLE_S)
        return self.look()

    def look(self) -> StackSnapshot:
        """Return the current state; raise RuntimeFailure once the stack has ended."""
        if (description := self._run_dir.running()) is None:
            raise RuntimeFailure(f"the stack {self._name!r} has ended")
        self._description = description
        problems: list[str] = []
        processes = self._processes(problems)
        several = not description.model
        status = None if several else self._status(problems)
        return StackSnapshot(
            name=self._name,
            at=time.time(),
            uptime_s=seconds_since(self._description.started),
            processes=processes,
            free_memory_bytes=psutil.virtual_memory().available,
            status=status,
            problems=problems,
            models=self._models(problems) if several else [],
        )

    def _models(self, problems: list[str]) -> list[ModelStatus]:
        try:
            return list_models(self._name, _ANSWER_S)
        except SsdError as error:
            problems.append(f"the server does not answer: {error}")
            return []

    def _status(self, problems: list[str]) -> Status | None:
        try:
            return self._client.status(_ANSWER_S)
        except SsdError as error:
            problems.append(f"the orchestrator does not answer: {error}")
            return None

    def _processes(self, problems: list[str]) -> list[ProcessFigures]:
        supervisor = ProcessStatus(
            role="supervisor",
            pid=self._description.pid,
            backend="",
            model="",
            state="running",
            restarts=0,
        )
        children: list[ProcessStatus] = []
        try:
            answer = ask_supervisor(self._name, StackRequest(), _ANSWER_S)
            children = answer.processes if isinstance(answer, Stack) else []
        except SsdError as error:
            problems.append(f"the supervisor does not answer: {error}")
        statuses = [supervisor, *children]
        self._seen = {pid: p for pid, p in self._seen.items() if pid in {t.pid for t in statuses}}
        return [self._figures(status) for status in statuses]

    def _figures(self, process_status: ProcessStatus) -> ProcessFigures:
        memory, cpu, uptime = 0, 0.0, 0.0
        state: ProcessState | Literal["stopped", "gone"] = process_status.state
        try:
            process = self._seen.setdefault(process_status.pid, psutil.Process(process_status.pid))
            with process.oneshot():
                memory = process.memory_info().rss
                cpu = process.cpu_percent()
                uptime = max(0.0, time.time() - process.create_time())
                if process.status() == psutil.STATUS_STOPPED:
                    state = "stopped"
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            state = state if state == "lost" else "gone"
        return ProcessFigures(
            role=process_status.role,
            pid=process_status.pid,
            state=state,
            restarts=process_status.restarts,
            backend=process_status.backend,
            model=process_status.model,
            device=process_status.device,
            memory_bytes=memory,
            cpu_percent=cpu,
            uptime_s=uptime,
        )

    def close(self) -> None:
        """Close the connection to the orchestrator."""
        self._client.close()
