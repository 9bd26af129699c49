"""The supervisor: parent of all processes. Starts, watches, restarts, swaps and stops them.

After `start` returns, a thread watches the children and serves the control socket; the caller's
thread is free to be a client of the orchestrator.
"""

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from launch.models.pair import Pair, server_of
from launch.settings.settings import DRAFTER_SETTINGS, StackSettings, name_settings
from launch.signals import on_second_signal
from launch.stack.child import Child, Lifeline, RestartBudget, end_all, kill_all
from launch.stack.http_listener import HttpListener
from launch.stack.orchestrator_link import OrchestratorLink
from launch.stack.readiness import TICK_S, allow_loading, await_drafter, await_ready
from launch.stack.run_dir import RunDir, claim
from launch.stack.spawn import (
    describe_child,
    name_model,
    start_drafter,
    start_gateway,
    start_orchestrator,
    start_verifier,
)
from launch.stack.watchdog import SupervisorPost
from protocol.errors import RuntimeFailure, SsdError
from protocol.messages import (
    Done,
    ProcessState,
    ProcessStatus,
    Rejected,
    Role,
    ServiceDown,
    Stack,
    StackRequest,
    SwapDrafter,
    ToSupervisor,
)
from protocol.process.awake_clock import awake_time
from protocol.transport.address import find_tcp_error
from protocol.transport.channel import Hub

_log = logging.getLogger(__name__)

_CONNECT_S = 3.0
"""Time for a draft server to accept a connection, before a warning."""

Report = Callable[[ProcessStatus], None]

_START = {
    "orchestrator": start_orchestrator,
    "verifier": start_verifier,
    "drafter": start_drafter,
}


class Supervisor:
    """One stack of processes."""

    def __init__(
        self, settings: StackSettings, pair: Pair, run_dir: RunDir, report: Report
    ) -> None:
        self._given, self._settings = settings, allow_loading(settings, pair)
        self._pair = pair
        self._is_swapped = False
        """True if the drafter differs from the settings."""
        self.run_dir = run_dir
        self._report = report
        self._lifeline = Lifeline()
        self._children: dict[str, Child] = {}
        self._lost: dict[str, ServiceDown] = {}
        """Roles whose budget is spent, with the report on their last process."""
        self._absent: dict[str, float] = {}
        """Roles whose next process is still to be started, with the time."""
        self._starting: set[str] = set()
        self._budgets = {
            role: RestartBudget(settings.restarts, settings.restart_window_s)
            for role in (*_START, "gateway")
        }
        self.listener: HttpListener | None = None
        """Listening socket of the gateway, if there is one."""
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        self.failure: SsdError | None = None
        """Reason why the stack ended by itself, if it did."""
        self._has_folder = False
        self._post: SupervisorPost | None = None

    def start(self) -> None:
        """Start all processes and wait until they are ready; call `stop` even if that fails.

        Raises:
            ModelError, UsageError: a child could not start, with its reason.
            RuntimeFailure: a child died, or was not ready in time.
        """
        self.run_dir.create()
        self._has_folder = True
        claim(self.run_dir.path, os.getpid())
        self.listener = HttpListener(self._settings) if self._settings.http else None
        for role in _START:
            if role != "drafter" or self._pair.has_drafter:
                self._spawn(role)
        if self.listener is not None:
            self._spawn("gateway")
        if self._pair.server is not None:
            threading.Thread(
                target=self._try_server, args=(self._pair.server.address,), daemon=True
            ).start()
        missing = await_ready(
            self.run_dir.clients_address,
            self._children,
            self._settings.start_timeout_s,
            report=self._report_state,
            listener=self.listener,
            optional=frozenset({"drafter"} if self._pair.server else ()),
            ended=self._stopping.is_set,
        )
        self._starting |= missing
        for role in missing:
            self._report_state(role, "starting", "not there yet; until it is, decoding is plain")
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._watcher.start()
        # Last: a client that sees the description may stop us.
        self._describe()

    def _describe(self) -> None:
        pair, named = self._pair, name_settings(self._given)
        if self._is_swapped:  # a drafter other than in the settings
            named = {name: value for name, value in named.items() if name not in DRAFTER_SETTINGS}
        named["draft_backend"] = pair.backend
        models = pair.model, pair.draft_model, pair.adapter
        self.run_dir.describe(os.getpid(), *models, settings=named)

    def _try_server(self, address: str) -> None:
        """Warn if the draft server is absent; in a thread, since name resolution is slow."""
        if reason := find_tcp_error(address, _CONNECT_S):
            self._report_state("drafter", "starting", reason)

    def cancel_start(self) -> None:
        """Make a `start` in another thread fail soon; `stop` must still be called."""
        self._stopping.set()

    @property
    def answering(self) -> int:
        """Requests in progress or waiting, as far as is known."""
        status = self._post.watchdog.status if self._post is not None else None
        return status.active + status.waiting if status is not None else 0

    @property
    def pids(self) -> list[int]:
        """Process ids of all processes."""
        return [child.pid for child in list(self._children.values())]

    def _spawn(self, role: str) -> None:
        arguments = self._settings, self._pair, self.run_dir, self._lifeline.child_end
        if role == "gateway" and self.listener is not None:
            models = [name_model(self._settings, self._pair, self.run_dir)]
            self._adopt(start_gateway(self._settings, models, *arguments[2:], self.listener))
        else:
            self._adopt(_START[role](*arguments))

    def _adopt(self, child: Child) -> None:
        self._children[child.role] = child
        self.run_dir.note([other.pid for other in self._children.values()])
        self._report_state(child.role, "starting")

    def _watch(self) -> None:
        try:
            with SupervisorPost(self.run_dir, self._settings) as post:
                self._post = post
                while not self._stopping.is_set() and self.failure is None:
                    post.control.ready(TICK_S)
                    self._tick(post)
                    while received := post.control.receive():
                        peer, message = received
                        post.control.send(peer, self._handle(message, post))
        # An unwatched stack is worse than none, even after a SystemExit.
        except BaseException as error:  # noqa: BLE001
            self.failure = RuntimeFailure(f"the supervisor failed: {error}")
            with contextlib.suppress(OSError):  # our output is closed
                traceback.print_exc()
        self._ended.set()

    def _tick(self, post: SupervisorPost, but: str = "") -> None:
        """Do one tick; a role `but` is handled elsewhere at the moment."""
        try:
            self._keep_reachable(post.control)
            self._reap(post, but)
        except OSError as error:
            # The folder has just been deleted, or the system cannot create a process: the next
            # check retries.
            _log.warning("could not look after the processes, again soon: %s", error)

    def _keep_reachable(self, control: Hub[ToSupervisor]) -> None:
        """Restore the folder if it was deleted."""
        if not self.run_dir.path.exists():
            self.run_dir.restore(os.getpid())
            self._describe()
            self.run_dir.note([child.pid for child in self._children.values()])
        control.keep_bound(time.monotonic())

    def _reap(self, post: SupervisorPost, but: str) -> None:
        doomed = post.watchdog.look(self._children.values(), self._starting)
        if failure := post.link.take_failure():
            doomed["orchestrator"] = failure
        for role, reason in doomed.items():
            if self._children[role].exit_code is None:
                self._children[role].kill(reason)
        for child in list(self._children.values()):
            away = child.role in {*self._lost, *self._absent, but}
            if child.exit_code is not None and not away:
                self._replace(child, post.link)
        for role in list(self._absent):
            self._start_again(role)
        for role in [role for role in self._starting if post.watchdog.ready(self._children[role])]:
            self._starting.remove(role)
            self._report_state(role, "running")
            if role == "orchestrator":  # a new one does not know which services are lost
                for lost in self._lost.values():
                    post.link.report_service_down(lost)

    def _replace(self, child: Child, link: OrchestratorLink) -> None:
        """Restart it, or do without a service; without orchestrator or gateway the stack ends."""
        role = child.role
        again = self._budgets[role].spend(time.monotonic())
        reason = child.last_words()
        child.kill_group()
        if not again:
            reason = f"{reason}; it was restarted {self._budgets[role].used} times"
        if role in ("verifier", "drafter"):
            service: Role = "verifier" if role == "verifier" else "drafter"
            down = ServiceDown(role=service, pid=child.pid, reason=reason, final=not again)
            if not again:
                self._lost[role] = down
            link.report_service_down(down)
        elif not again:
            self.failure = RuntimeFailure(reason)
        self._report_state(role, "died" if again else "lost", reason)
        self._starting.discard(role)
        if again:
            self._absent[role] = awake_time()

    def _start_again(self, role: str) -> None:
        """Start a process; raise OSError if the system cannot now, to be retried."""
        try:
            self._spawn(role)
        except OSError as error:
            if awake_time() - self._absent[role] > self._settings.start_timeout_s:
                self.failure = RuntimeFailure(f"the {role} cannot be started again: {error}")
            raise
        del self._absent[role]
        if role in _START:
            self._starting.add(role)

    # ------------------------------------------------------------ commands

    def _handle(
        self, message: ToSupervisor | SsdError, post: SupervisorPost
    ) -> Stack | Done | Rejected:
        try:
            match message:
                case StackRequest():
                    return Stack(processes=self.processes)
                case SwapDrafter():
                    self._swap(message, post)
                    return Done()
                case SsdError():
                    return Rejected(str(message))
        except (SsdError, OSError) as error:
            return Rejected(str(error))

    def _swap(self, message: SwapDrafter, post: SupervisorPost) -> None:
        """Start the new drafter next to the old one, or remove it for prompt lookup alone.

        The other processes are watched meanwhile: without an orchestrator this would not end.
        """
        old, old_pair = self._children.get("drafter"), self._pair
        self._pair = old_pair.with_drafter(
            message.backend,
            message.model,
            message.command,
            lines=message.lines,
            server=server_of(message.server, message.server_key, self._settings.key),
        )
        self._absent.pop("drafter", None)
        if old is not None and "drafter" in self._starting:
            _end(old)  # it must not say Hello after the new one, and replace it
        if self._pair.has_drafter:
            try:
                self._spawn("drafter")
                self._await_drafter(old, post)
            except (SsdError, OSError) as error:
                self._pair = old_pair
                self._restore_drafter(old, str(error), post.link)
                raise
        self._lost.pop("drafter", None)
        self._starting.discard("drafter")
        if old is not None and self._pair.has_drafter:
            _end(old)
        self._is_swapped = True
        self._describe()
        if self._pair.has_drafter:
            self._report_state("drafter", "running")
        elif self._children.pop("drafter", None) is not None and old is not None:
            _remove(old, "swapped for prompt lookup", post.link, gone=True)

    def _await_drafter(self, old: Child | None, post: SupervisorPost) -> None:
        await_drafter(
            self._children["drafter"],
            old,
            post.link,
            self._settings.start_timeout_s,
            meanwhile=lambda: self._tick(post, but="drafter"),
            ended=lambda: self._stopping.is_set() or self.failure is not None,
        )

    def _restore_drafter(self, old: Child | None, reason: str, link: OrchestratorLink) -> None:
        """Restore the drafter from before a failed swap, or none."""
        new = self._children.pop("drafter", None)
        if old is not None:
            self._children["drafter"] = old
        if new is not None and new is not old:
            _remove(new, reason, link, gone=old is None)

    # ------------------------------------------------------------ status and stop

    def _state_of(self, role: str) -> ProcessState:
        if role in self._lost:
            return "lost"
        return "starting" if role in {*self._starting, *self._absent} else "running"

    @property
    def processes(self) -> list[ProcessStatus]:
        """All processes, in their current state."""
        return [self._status_of(role, self._state_of(role)) for role in list(self._children)]

    def _status_of(self, role: str, state: ProcessState, note: str = "") -> ProcessStatus:
        status = describe_child(self._children[role], self._settings, self._pair)
        restarts = self._budgets[role].used
        return msgspec.structs.replace(status, state=state, note=note, restarts=restarts)

    def _report_state(self, role: str, state: ProcessState, note: str = "") -> None:
        with contextlib.suppress(OSError):  # our output is closed
            self._report(self._status_of(role, state, note))

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait; return only by an exception: the caller's interrupt, or the stack's failure.

        Args:
            meanwhile: called repeatedly until then.
        """
        while self.failure is None:
            # Without `launch.signals`, a signal just before a wait is handled after it.
            self._ended.wait(TICK_S)
            if meanwhile is not None:
                meanwhile()
        raise self.failure

    def stop(self) -> None:
        """Stop all processes and remove all files; safe to call twice."""
        self._stopping.set()
        with on_second_signal(self.kill):
            self._stop()

    def kill(self) -> None:
        """Kill all processes at once; `stop` must still be called."""
        kill_all(list(self._children.values()))

    def _stop(self) -> None:
        if self._watcher is not None and self._watcher.is_alive():
            self._watcher.join()
        end_all(self._children.values())
        self._lifeline.close()
        if self.listener is not None:
            self.listener.close()
        if self._has_folder:
            self._has_folder = False
            self.run_dir.remove()


def _end(child: Child) -> None:
    child.ask_to_end()
    child.end()


def _remove(child: Child, reason: str, link: OrchestratorLink, *, gone: bool) -> None:
    """End a drafter, and tell the orchestrator; `gone`: it is not replaced."""
    _end(child)
    down = ServiceDown(role="drafter", pid=child.pid, reason=reason, final=gone, removed=gone)
    link.report_service_down(down)
