"""Serves several models over HTTP: a gateway, and stacks that are started on demand.

One thread decides (`pool`), answers the gateway and watches it; slow work runs in the stacks' own
threads (`stacks`).
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import psutil

from launch.serving.models_file import ModelEntry
from launch.serving.pool import (
    ChangeDrafter,
    Grant,
    LoadModel,
    LocateModel,
    ModelPool,
    PoolAction,
    Refuse,
    UnloadModel,
)
from launch.serving.stacks import (
    DrafterChanged,
    ModelBroken,
    ModelEnded,
    ModelLoaded,
    ModelLocated,
    ModelStacks,
    ModelUnloaded,
    StackEvent,
)
from launch.settings.settings import StackSettings
from launch.signals import on_second_signal
from launch.stack.child import Child, Lifeline, RestartBudget, end_all, kill_all
from launch.stack.http_listener import HttpListener
from launch.stack.readiness import TICK_S, await_gateway
from launch.stack.run_dir import RunDir, claim
from launch.stack.spawn import describe_gateway, start_gateway
from launch.stack.supervisor import Report
from protocol.errors import RuntimeFailure, SsdError
from protocol.gateway import GatewayModel
from protocol.messages import (
    Models,
    ModelsRequest,
    ProcessState,
    Rejected,
    ReleaseModel,
    Stack,
    StackRequest,
    SwapDrafter,
    ToModelServer,
    UseModel,
)
from protocol.transport.channel import STRANGER_BYTES, Hub
from protocol.transport.codec import Decoder

_log = logging.getLogger(__name__)

_OURS = b"the server's own use"
"""The user of models that are loaded with the server."""


class ModelServer:
    """A server of several models; call `start`, `wait`, and always `stop`."""

    def __init__(
        self,
        settings: StackSettings,
        entries: Sequence[ModelEntry],
        run_dir: RunDir,
        report: Report,
    ) -> None:
        self._settings = settings
        self._entries = entries
        self.run_dir = run_dir
        self._report = report
        named = {entry.name: entry for entry in entries}
        self._stacks = ModelStacks(named, run_dir.path.name, report)
        self._pool = ModelPool(
            idle_unload_s=settings.idle_unload,
            budget_bytes=settings.memory_bytes,
            timeout_s=settings.start_timeout_s,
        )
        for entry in entries:
            stack = self._stacks.run_dir(entry.name).path.name
            self._pool.add(
                entry.name,
                stack,
                keep_loaded=entry.keep_loaded,
                most_waiting=entry.settings.max_waiting,
            )
        self._lifeline = Lifeline()
        self._listener: HttpListener | None = None
        self._gateway: Child | None = None
        self._budget = RestartBudget(settings.restarts, settings.restart_window_s)
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="model server", daemon=True)
        self._failure: SsdError | None = None
        self._has_folder = False

    @property
    def url(self) -> str:
        """Address of the gateway; raises RuntimeFailure before `start`."""
        if self._listener is None:
            raise RuntimeFailure("the server has not been started")
        return self._listener.url

    def start(self) -> None:
        """Start the gateway; models are loaded on demand.

        Raises:
            UsageError: the address is not available.
            RuntimeFailure: the gateway does not start, or a stack of this name is running.
        """
        self.run_dir.create()
        self._has_folder = True
        claim(self.run_dir.path, os.getpid())
        self._listener = HttpListener(self._settings)
        gateway = self._start_gateway()
        self._stacks.locate_local()
        self._thread.start()
        await_gateway(self._listener, [gateway], self._settings.start_timeout_s)
        self._report_gateway("running", f"at {self.url}")
        self.run_dir.describe(os.getpid(), "", "")

    def _start_gateway(self) -> Child:
        assert self._listener is not None  # noqa: S101  # set by `start`
        arguments = (
            self._settings,
            self._offer(),
            self.run_dir,
            self._lifeline.child_end,
            self._listener,
        )
        child = start_gateway(*arguments, model_server=self.run_dir.control_address)
        self._gateway = child
        self.run_dir.note([child.pid])
        self._report_gateway("starting", "")
        return child

    def _offer(self) -> list[GatewayModel]:
        """Return the models for the gateway; the first is the default."""
        names = [[entry.name, *entry.aliases] for entry in self._entries]
        taken_names = {name for aliases in names for name in aliases}
        names[0] += [name for name in ("default", "default_model") if name not in taken_names]
        return [
            GatewayModel(
                names=aliases,
                clients_address=self._stacks.run_dir(entry.name).clients_address,
                drafters=list(entry.drafters),
            )
            for entry, aliases in zip(self._entries, names, strict=True)
        ]

    # ------------------------------------------------------------ the deciding thread

    def _run(self) -> None:
        try:
            control: Hub[ToModelServer] = Hub(
                self.run_dir.control_address, Decoder(ToModelServer), stranger_bytes=STRANGER_BYTES
            )
            with control:
                self._load_kept(time.monotonic())
                while not self._stopping.is_set() and self._failure is None:
                    control.ready(TICK_S)
                    self._tick(control, time.monotonic())
        # An unwatched server is worse than none, even after a SystemExit.
        except BaseException as error:  # noqa: BLE001
            _log.exception("the model server failed")
            self._failure = RuntimeFailure(f"the model server failed: {error}")
        self._ended.set()

    def _load_kept(self, now: float) -> None:
        for entry in self._entries:
            if entry.keep_loaded:
                self._pool.request(entry.name, _OURS + entry.name.encode(), "", now)

    def _tick(self, control: Hub[ToModelServer], now: float) -> None:
        for event in self._stacks.events():
            self._learn(event, control, now)
        while received := control.receive():
            self._handle(control, *received, now)
        self._look_after_gateway(now)
        self._keep_reachable(control, now)
        free_bytes = psutil.virtual_memory().available
        for action in self._pool.decide(now, free_bytes, self._stacks.busy()):
            self._act(action, control, now)

    def _learn(self, event: StackEvent, control: Hub[ToModelServer], now: float) -> None:
        match event:
            case ModelLocated(model=model, memory_bytes=memory_bytes):
                self._pool.on_located(model, memory_bytes)
            case ModelLoaded(model=model, memory_bytes=memory_bytes):
                self._pool.on_loaded(model, memory_bytes, now)
            case ModelUnloaded(model=model):
                self._pool.on_unloaded(model)
            case ModelEnded(model=model):
                self._pool.on_ended(model)
            case ModelBroken(model=model, reason=reason):
                self._pool.on_failed(model, reason, now)
            case DrafterChanged(model=model, reason=reason):
                for action in self._pool.on_drafter(model, reason, now):
                    self._act(action, control, now)

    def _handle(
        self,
        control: Hub[ToModelServer],
        peer: bytes,
        message: ToModelServer | SsdError,
        now: float,
    ) -> None:
        match message:
            case UseModel(model=model) if model not in self._pool:
                control.send(peer, Rejected(f"there is no model {model!r} here"))
            case UseModel(model=model, drafter=drafter) if not self._stacks.knows(model, drafter):
                control.send(peer, Rejected(f"the model {model!r} has no drafter {drafter!r}"))
            case UseModel():
                self._pool.request(message.model, peer, message.drafter, now)
            case ReleaseModel():
                self._pool.release(peer, now)
            case ModelsRequest():
                control.send(peer, Models(models=self._pool.describe()))
            case StackRequest():
                gateway = [describe_gateway(self._gateway)] if self._gateway is not None else []
                control.send(peer, Stack(processes=[*gateway, *self._stacks.processes()]))
            case SwapDrafter():
                stacks = ", ".join(f"--name {model.stack}" for model in self._pool.describe())
                control.send(
                    peer, Rejected(f"this server has several models; give one of {stacks}")
                )
            case SsdError():
                control.send(peer, Rejected(str(message)))

    def _act(self, action: PoolAction, control: Hub[ToModelServer], now: float) -> None:
        match action:
            case LocateModel(model=model):
                self._stacks.locate(model)
            case LoadModel(model=model):
                self._stacks.load(model)
            case UnloadModel(model=model):
                self._stacks.unload(model)
            case ChangeDrafter(model=model, drafter=drafter):
                self._stacks.change_drafter(model, drafter)
            case Grant(model=model, use=use):
                ready = self._stacks.introduce(model)
                # A user that has left meanwhile, or the server itself, no longer needs it.
                if use.startswith(_OURS) or not control.send(use, ready):
                    self._pool.release(use, now)
            case Refuse(use=use, reason=reason) if use.startswith(_OURS):
                _log.warning("a model that is to stay loaded is not: %s", reason)
            case Refuse(use=use):
                control.send(use, Rejected(action.reason, action.kind))

    def _look_after_gateway(self, now: float) -> None:
        child = self._gateway
        if child is None or child.exit_code is None:
            return
        reason = child.last_words()
        child.kill_group()
        self._pool.release_all(now)
        if not self._budget.spend(now):
            self._failure = RuntimeFailure(f"{reason}; it was restarted {self._budget.used} times")
            return
        self._report_gateway("died", reason)
        self._start_gateway()

    def _keep_reachable(self, control: Hub[ToModelServer], now: float) -> None:
        """Restore the folder if it was deleted."""
        if not self.run_dir.path.exists() and self._gateway is not None:
            self.run_dir.restore(os.getpid())
            self.run_dir.describe(os.getpid(), "", "")
            self.run_dir.note([self._gateway.pid])
        control.keep_bound(now)

    def _report_gateway(self, state: ProcessState, note: str) -> None:
        if self._gateway is not None:
            with contextlib.suppress(OSError):  # our output is closed
                status = describe_gateway(self._gateway)
                self._report(msgspec.structs.replace(status, state=state, note=note))

    # ------------------------------------------------------------ the end

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait; return only by an exception: the caller's interrupt, or the server's failure.

        Args:
            meanwhile: called repeatedly until then.
        """
        while self._failure is None:
            self._ended.wait(TICK_S)
            meanwhile()
        raise self._failure

    def stop(self) -> None:
        """Stop all processes and remove all files; safe to call twice."""
        self._stopping.set()
        with on_second_signal(self._kill):
            if self._thread.is_alive():
                self._thread.join()
            children = [self._gateway] if self._gateway is not None else []
            for child in children:
                child.ask_to_end()
            self._stacks.stop()
            end_all(children)
            self._lifeline.close()
            if self._listener is not None:
                self._listener.close()
            if self._has_folder:
                self._has_folder = False
                self.run_dir.remove()

    def _kill(self) -> None:
        self._stacks.kill()
        kill_all([self._gateway] if self._gateway is not None else [])
