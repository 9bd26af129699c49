"""Decides which models are loaded, from requests, use, and memory.

Pure: no processes, no clock. `decide` returns the actions that are due; the model server executes
them and reports back through the `on_...` methods.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from protocol.messages import ModelState, ModelStatus, RejectedKind

RETRY_S = 10.0
"""Time after a failure during which requests get the same error, before the model is retried."""

_FAIR_S = 10.0
"""Wait for room after which the models that would have to make room accept no new requests."""

Use = bytes
"""The user of a model: a connection."""


@dataclass(frozen=True)
class LocateModel:
    """Find the model's files; download them if needed."""

    model: str


@dataclass(frozen=True)
class LoadModel:
    """Start its processes."""

    model: str


@dataclass(frozen=True)
class UnloadModel:
    """Stop its processes; it is not in use."""

    model: str


@dataclass(frozen=True)
class ChangeDrafter:
    """Replace its drafter; the model is not in use meanwhile."""

    model: str
    drafter: str


@dataclass(frozen=True)
class Grant:
    """Report that the model may be used."""

    model: str
    use: Use


@dataclass(frozen=True)
class Refuse:
    """Report that the model cannot be used."""

    use: Use
    reason: str
    kind: RejectedKind


PoolAction = LocateModel | LoadModel | UnloadModel | ChangeDrafter | Grant | Refuse


@dataclass(frozen=True)
class _Waiting:
    use: Use
    drafter: str
    since: float


@dataclass
class _Entry:
    name: str
    stack: str
    keep_loaded: bool
    state: ModelState = "unloaded"
    note: str = ""
    memory_bytes: int | None = None
    """None: unknown until its files are located."""
    most_waiting: int = 0
    """Most waiting requests; 0 is unlimited."""
    drafter: str = ""
    """Name of the running drafter; empty: the initial one."""
    is_changing: bool = False
    """True while its drafter is being replaced."""
    users: set[Use] = field(default_factory=set)
    waiting: deque[_Waiting] = field(default_factory=deque)
    used_at: float = 0.0
    failed_at: float = 0.0

    @property
    def takes_memory(self) -> bool:
        """True if it has processes."""
        return self.state in ("loading", "loaded", "unloading")


class ModelPool:
    """The models of a server.

    Args:
        idle_unload_s: idle time after which a model is unloaded; 0: never.
        budget_bytes: most memory for all models; 0: the machine's free memory.
        timeout_s: longest wait for other models to make room.
    """

    def __init__(self, *, idle_unload_s: float, budget_bytes: int, timeout_s: float) -> None:
        self._idle_unload_s = idle_unload_s
        self._budget_bytes = budget_bytes
        self._timeout_s = timeout_s
        self._entries: dict[str, _Entry] = {}

    def add(
        self,
        name: str,
        stack: str,
        *,
        keep_loaded: bool,
        memory_bytes: int | None = None,
        most_waiting: int = 0,
    ) -> None:
        """Add an unloaded model with a limit of waiting requests; 0 is unlimited."""
        self._entries[name] = _Entry(
            name, stack, keep_loaded, memory_bytes=memory_bytes, most_waiting=most_waiting
        )

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def describe(self) -> list[ModelStatus]:
        """Return all models in the order of addition."""
        return [
            ModelStatus(
                name=entry.name,
                state=entry.state,
                stack=entry.stack,
                note=entry.note,
                memory_bytes=entry.memory_bytes or 0,
                answering=len(entry.users),
                waiting=len(entry.waiting),
            )
            for entry in self._entries.values()
        ]

    # ------------------------------------------------------------ what happens

    def request(self, name: str, use: Use, drafter: str, now: float) -> None:
        """Request the use of a model; the answer is a Grant or a Refuse."""
        self._entries[name].waiting.append(_Waiting(use, drafter, now))

    def release(self, use: Use, now: float) -> None:
        """End a use, or a request for one; unknown ones have ended already."""
        for entry in self._entries.values():
            if use in entry.users:
                entry.users.remove(use)
                entry.used_at = now
            entry.waiting = deque(waiter for waiter in entry.waiting if waiter.use != use)

    def release_all(self, now: float) -> None:
        """End all uses."""
        for entry in self._entries.values():
            if entry.users:
                entry.used_at = now
            entry.users.clear()
            entry.waiting.clear()

    def on_located(self, name: str, memory_bytes: int) -> None:
        """Record that its files are local, and its memory estimate."""
        self._set(name, "unloaded", memory_bytes=memory_bytes)

    def on_loaded(self, name: str, memory_bytes: int, now: float) -> None:
        """Record that its processes are ready, and their memory."""
        entry = self._entries[name]
        memory = max(memory_bytes, entry.memory_bytes or 0)
        self._set(name, "loaded", memory_bytes=memory)
        entry.used_at = now
        entry.drafter = ""

    def on_unloaded(self, name: str) -> None:
        """Record that its processes have ended."""
        self._set(name, "unloaded")

    def on_ended(self, name: str) -> None:
        """Record that it ended by itself; it fails once its remains are removed."""
        self._set(name, "unloading", note="its processes have ended")

    def on_failed(self, name: str, reason: str, now: float) -> None:
        """Record that it could not be located or loaded, or ended by itself: it has no
        processes.
        """
        self._set(name, "failed", note=reason)
        entry = self._entries[name]
        entry.failed_at = now
        entry.users.clear()

    def on_drafter(self, name: str, reason: str, now: float) -> Iterator[Refuse]:
        """Record the result of a drafter change; refuse its requesters if there is a reason.

        Does nothing if the model itself has ended meanwhile.
        """
        entry = self._entries[name]
        if not entry.is_changing:
            return
        self._set(name, "loaded")
        entry.used_at = now
        if not reason:
            return
        requested, entry.drafter = entry.drafter, ""
        for waiter in [waiter for waiter in entry.waiting if waiter.drafter == requested]:
            entry.waiting.remove(waiter)
            yield Refuse(waiter.use, reason, "unavailable")

    def _set(
        self, name: str, state: ModelState, *, note: str = "", memory_bytes: int | None = None
    ) -> None:
        entry = self._entries[name]
        entry.state, entry.note, entry.is_changing = state, note, False
        if memory_bytes is not None:
            entry.memory_bytes = memory_bytes

    # ------------------------------------------------------------ what is to be done

    def decide(self, now: float, free_bytes: int, busy: Collection[str]) -> list[PoolAction]:
        """Return the actions that are due.

        Args:
            now: seconds of a monotonic clock.
            free_bytes: free memory of the machine.
            busy: models that answer clients outside this server, such as `ssd chat`.
        """
        for name in busy:
            self._entries[name].used_at = now
        actions: list[PoolAction] = []
        starved = self._find_starved(now)
        held_back = self._hold_back(starved, free_bytes) if starved is not None else []
        for entry in self._entries.values():
            if entry.name not in held_back:
                actions += self._serve(entry, now, free_bytes, busy)
            actions += _refuse_surplus(entry)
        actions += self._unload_idle(now, busy)
        return actions

    def _find_starved(self, now: float) -> _Entry | None:
        """Return the model that has waited longest for room, if that is too long."""
        waiting = [
            entry
            for entry in self._entries.values()
            if entry.waiting
            and entry.state in ("unloaded", "failed")
            and now - entry.waiting[0].since >= _FAIR_S
        ]
        return min(waiting, key=lambda entry: entry.waiting[0].since, default=None)

    def _hold_back(self, starved: _Entry, free_bytes: int) -> list[str]:
        """Return models that accept no new requests, so that the starved one gets its room."""
        missing = (starved.memory_bytes or 0) - self._room(free_bytes)
        loaded = [e for e in self._entries.values() if e.state == "loaded" and not e.keep_loaded]
        names: list[str] = []
        for entry in sorted(loaded, key=lambda entry: (bool(entry.users), entry.used_at)):
            if missing > 0:
                missing -= entry.memory_bytes or 0
                names.append(entry.name)
        others = (e for e in self._entries.values() if e.state == "unloaded" and e is not starved)
        return [*names, *(entry.name for entry in others)]

    def _serve(
        self, entry: _Entry, now: float, free_bytes: int, busy: Collection[str]
    ) -> Iterator[PoolAction]:
        if not entry.waiting:
            return
        match entry.state:
            case "loaded":
                yield from self._grant(entry, busy)
            case "failed" if now - entry.failed_at < RETRY_S:
                yield from _refuse_all(entry, entry.note, "unavailable")
            case "failed" | "unloaded" if entry.memory_bytes is None:
                entry.state, entry.note = "loading", "looking for its files"
                yield LocateModel(entry.name)
            case "failed" | "unloaded":
                yield from self._load(entry, now, free_bytes, busy)
            case _:
                pass  # its current work will end

    def _grant(self, entry: _Entry, busy: Collection[str]) -> Iterator[PoolAction]:
        """Grant uses in order; a request for another drafter waits until the model is unused."""
        while entry.waiting:
            first = entry.waiting[0]
            if first.drafter not in ("", entry.drafter):
                if not entry.users and entry.name not in busy:
                    entry.state, entry.note = "loading", f"changing its drafter to {first.drafter}"
                    entry.drafter, entry.is_changing = first.drafter, True
                    yield ChangeDrafter(entry.name, first.drafter)
                return
            entry.waiting.popleft()
            entry.users.add(first.use)
            yield Grant(entry.name, first.use)

    def _load(
        self, entry: _Entry, now: float, free_bytes: int, busy: Collection[str]
    ) -> Iterator[PoolAction]:
        """Load it, if needed after other models have made room."""
        needed = entry.memory_bytes or 0
        room = self._room(free_bytes)
        if needed <= room:
            entry.state, entry.note = "loading", ""
            yield LoadModel(entry.name)
            return
        others = [other for other in self._entries.values() if other.takes_memory]
        removable = [other for other in others if not other.keep_loaded]
        if needed > room + _sum(removable):
            most = room + _sum(removable)
            yield from _refuse_all(entry, _describe_lack(entry.name, needed, most), "unavailable")
            return
        room += _sum(other for other in removable if other.state == "unloading")
        starved = self._find_starved(now) is entry
        idle = [other for other in removable if _is_idle(other, busy, is_needed=starved)]
        if needed > room + _sum(idle):
            yield from self._refuse_late(entry, now)
            return
        for other in sorted(idle, key=lambda entry: entry.used_at):
            if needed <= room:
                return
            room += other.memory_bytes or 0
            other.state, other.note = "unloading", f"makes room for {entry.name}"
            yield UnloadModel(other.name)

    def _room(self, free_bytes: int) -> int:
        """Return the memory available for one more model."""
        loading = (e for e in self._entries.values() if e.state == "loading")
        if not self._budget_bytes:
            return free_bytes - _sum(loading)  # it has hardly allocated its share yet
        return self._budget_bytes - _sum(e for e in self._entries.values() if e.takes_memory)

    def _refuse_late(self, entry: _Entry, now: float) -> Iterator[Refuse]:
        """Refuse requests that have waited too long for room."""
        while entry.waiting and now - entry.waiting[0].since >= self._timeout_s:
            reason = (
                f"the models that would have to make room for {entry.name!r} are all answering; "
                "try again later"
            )
            yield Refuse(entry.waiting.popleft().use, reason, "busy")

    def _unload_idle(self, now: float, busy: Collection[str]) -> Iterator[UnloadModel]:
        for entry in self._entries.values():
            unused = now - entry.used_at >= self._idle_unload_s > 0
            if unused and not entry.keep_loaded and _is_idle(entry, busy):
                entry.state, entry.note = "unloading", "it has not been used for a while"
                yield UnloadModel(entry.name)


def _is_idle(entry: _Entry, busy: Collection[str], *, is_needed: bool = False) -> bool:
    """Return True if it is unused; requests may still wait for it."""
    in_use = entry.users or (entry.waiting and not is_needed) or entry.name in busy
    return entry.state == "loaded" and not in_use


def _refuse_all(entry: _Entry, reason: str, kind: RejectedKind) -> Iterator[Refuse]:
    entry.note = reason
    while entry.waiting:
        yield Refuse(entry.waiting.popleft().use, reason, kind)


def _refuse_surplus(entry: _Entry) -> Iterator[Refuse]:
    """Refuse the latest requests beyond the limit."""
    reason = f"too many requests wait for the model {entry.name!r}; try again later (max_waiting)"
    while 0 < entry.most_waiting < len(entry.waiting):
        yield Refuse(entry.waiting.pop().use, reason, "busy")


def _sum(entries: Iterable[_Entry]) -> int:
    return sum(entry.memory_bytes or 0 for entry in entries)


def _describe_lack(name: str, needed: int, most: int) -> str:
    return (
        f"the model {name!r} needs about {needed / 1e9:.1f} GB of memory, and at most "
        f"{max(0, most) / 1e9:.1f} GB can be had for it, even without the other models "
        "(memory_bytes)"
    )
