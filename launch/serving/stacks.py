"""The stacks of a server's models: started, changed and stopped in separate threads."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from launch.models.pair import Pair, pair_of
from launch.serving.footprint import estimate_memory, measure_memory
from launch.serving.models_file import ModelEntry
from launch.stack.control import ask_supervisor
from launch.stack.run_dir import RunDir
from launch.stack.spawn import preset_sampling
from launch.stack.supervisor import Report, Supervisor
from protocol.errors import SsdError
from protocol.messages import ModelReady, ProcessStatus

_log = logging.getLogger(__name__)

_STOP_S = 60.0
"""Longest wait for all stacks to stop; their own limits are much shorter."""


@dataclass(frozen=True)
class ModelLocated:
    """The model's files are local; it will take this much memory."""

    model: str
    memory_bytes: int


@dataclass(frozen=True)
class ModelLoaded:
    """Its processes are ready, and take this much memory."""

    model: str
    memory_bytes: int


@dataclass(frozen=True)
class ModelUnloaded:
    """Its processes have ended."""

    model: str


@dataclass(frozen=True)
class DrafterChanged:
    """Its drafter was replaced; if there is a reason, it was not, for that reason."""

    model: str
    reason: str


@dataclass(frozen=True)
class ModelEnded:
    """It ended by itself; `ModelBroken` follows once its remains are removed."""

    model: str


@dataclass(frozen=True)
class ModelBroken:
    """It could not be located or loaded, or ended by itself; it has no processes."""

    model: str
    reason: str


StackEvent = ModelLocated | ModelLoaded | ModelUnloaded | DrafterChanged | ModelEnded | ModelBroken


class ModelStacks:
    """The stacks of these models.

    Every command returns at once; its result is among the `events`.

    Args:
        entries: the models by name.
        server: name of the server; its stacks are named after it.
        report: called whenever the state of a process changes.
    """

    def __init__(self, entries: Mapping[str, ModelEntry], server: str, report: Report) -> None:
        self._entries = entries
        self._server = server
        self._report = report
        self._pairs: dict[str, Pair] = {}
        self._starting: dict[str, Supervisor] = {}
        self._running: dict[str, Supervisor] = {}
        self._threads: list[threading.Thread] = []
        self._events: queue.SimpleQueue[StackEvent] = queue.SimpleQueue()
        self._stopping = threading.Event()

    def run_dir(self, model: str) -> RunDir:
        """Return the run folder of a model's stack, running or not."""
        return RunDir(f"{self._server}-{self._entries[model].slug}")

    def knows(self, model: str, drafter: str) -> bool:
        """Return True if the model has a drafter of this name; "" is the one it starts with."""
        return not drafter or drafter in self._entries[model].drafters

    def introduce(self, model: str) -> ModelReady:
        """Describe a located model for its users."""
        pair, settings = self._pairs[model], self._entries[model].settings
        return ModelReady(folder=pair.model, sampling=preset_sampling(settings, pair))

    def events(self) -> Iterator[StackEvent]:
        """Yield the events since the last call."""
        for model, supervisor in list(self._running.items()):
            if supervisor.failure is not None:
                del self._running[model]
                yield ModelEnded(model)
                self._start_thread(partial(self._remove, model, supervisor))
        while not self._events.empty():
            yield self._events.get_nowait()

    def busy(self) -> set[str]:
        """Return the models that are answering a request, whichever client sent it."""
        return {name for name, stack in list(self._running.items()) if stack.answering}

    def processes(self) -> Iterator[ProcessStatus]:
        """Yield the processes of all stacks, with the model before the role."""
        for name, supervisor in [*self._starting.items(), *self._running.items()]:
            for status in supervisor.processes:
                yield self._name(name, status)

    # ------------------------------------------------------------ commands

    def locate(self, model: str) -> None:
        """Find its files, and download missing ones."""
        self._start_thread(partial(self._attempt, model, self._locate))

    def locate_local(self) -> None:
        """Locate the models that need no download, so that their size is known."""
        for model, entry in self._entries.items():
            reference = entry.settings.model
            if "/" not in reference or Path(reference).expanduser().is_dir():
                self.locate(model)

    def load(self, model: str) -> None:
        """Start the stack of a located model."""
        self._start_thread(partial(self._attempt, model, self._load))

    def unload(self, model: str) -> None:
        """Stop its stack."""
        supervisor = self._running.pop(model, None)

        def stop() -> None:
            if supervisor is not None:
                _stop(model, supervisor)
            self._events.put(ModelUnloaded(model))

        self._start_thread(stop)

    def change_drafter(self, model: str, drafter: str) -> None:
        """Replace its drafter by another one of the model."""

        def change() -> None:
            try:
                entry = self._entries[model]
                swap = entry.drafters[drafter].swap()
                # The supervisor's limit for the new drafter, and a little for its answer.
                timeout_s = entry.settings.start_timeout_s + 10.0
                ask_supervisor(self.run_dir(model).path.name, swap, timeout_s)
            except (SsdError, OSError) as error:
                self._events.put(DrafterChanged(model, f"the drafter {drafter!r}: {error}"))
            else:
                self._events.put(DrafterChanged(model, ""))

        self._start_thread(change)

    # ------------------------------------------------------------ in threads

    def _start_thread(self, work: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name="model stack", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _attempt(self, model: str, work: Callable[[str], StackEvent]) -> None:
        """Run the work of a command; an error fails this model and no other."""
        try:
            event = work(model)
        except (SsdError, OSError) as error:
            event = ModelBroken(model, str(error))
        # A bug that one model brings out must not leave its waiting requests unanswered.
        except Exception as error:  # noqa: BLE001
            _log.exception("the model %s failed", model)
            event = ModelBroken(model, f"{type(error).__name__}: {error}")
        self._events.put(event)

    def _locate(self, model: str) -> ModelLocated:
        settings = self._entries[model].settings
        pair = pair_of(settings)
        self._pairs[model] = pair
        return ModelLocated(model, estimate_memory(settings, pair))

    def _load(self, model: str) -> ModelLoaded:
        entry = self._entries[model]
        supervisor = Supervisor(
            entry.settings,
            self._pairs[model],
            self.run_dir(model),
            lambda status: self._report(self._name(model, status)),
        )
        self._starting[model] = supervisor
        try:
            if self._stopping.is_set():
                supervisor.cancel_start()
            supervisor.start()
        except BaseException:
            supervisor.stop()
            raise
        else:
            self._running[model] = supervisor
        finally:
            del self._starting[model]
        return ModelLoaded(model, measure_memory(supervisor.pids))

    def _remove(self, model: str, supervisor: Supervisor) -> None:
        """Remove a stack that has ended by itself."""
        _stop(model, supervisor)
        self._events.put(ModelBroken(model, str(supervisor.failure)))

    def _name(self, model: str, status: ProcessStatus) -> ProcessStatus:
        return msgspec.structs.replace(status, role=f"{self._entries[model].slug} {status.role}")

    # ------------------------------------------------------------ shutdown

    def stop(self) -> None:
        """Stop all of them concurrently, and wait."""
        self._stopping.set()
        for supervisor in list(self._starting.values()):
            supervisor.cancel_start()
        for model in list(self._running):
            self.unload(model)
        for thread in self._threads:
            thread.join(_STOP_S)
        for supervisor in list(self._running.values()):  # became ready during the loops above
            supervisor.stop()

    def kill(self) -> None:
        """Kill all processes at once; `stop` still waits for them."""
        for supervisor in [*self._starting.values(), *self._running.values()]:
            supervisor.kill()


def _stop(model: str, supervisor: Supervisor) -> None:
    """Stop a stack; whatever goes wrong, waiting requests must be answered."""
    try:
        supervisor.stop()
    # As in `ModelStacks._attempt`.
    except Exception:  # noqa: BLE001
        _log.exception("the stack of the model %s was not stopped", model)
