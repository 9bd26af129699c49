"""A campaign: one fault after another, at random moments of the load, and what came of each."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.client.client import Client
from protocol.errors import DeadlineExceeded, RuntimeFailure, SsdError
from protocol.messages import Status
from tests.chaos.faults import Fault, Victim, list_faults
from tests.chaos.load import Load
from tests.chaos.starts import Starts

_TWICE = 0.1
"""Share of faults that strike before the one before is mended."""


@dataclass
class Outcome:
    """What one class of faults did."""

    injected: int = 0
    silences_s: list[float] = field(default_factory=list)
    """Longest pause in the tokens of any client that touches the fault, each time."""
    mended_s: list[float] = field(default_factory=list)
    """Until every process was there and every client had tokens again."""
    beyond_start_s: list[float] = field(default_factory=list)
    """The same without the start of the process that took the place of the one that ended."""


class Campaign:
    """Runs faults against one stack."""

    def __init__(
        self,
        victim: Victim,
        load: Load,
        starts: Starts,
        timeout_s: float,
        progress: Callable[[str], None],
    ) -> None:
        """`timeout_s`: longest wait for the stack to be whole again, and for any answer."""
        self._victim = victim
        self._load = load
        self._starts = starts
        self._timeout_s = timeout_s
        self._progress = progress
        self.outcomes: dict[str, Outcome] = {}
        self._alone = True

    def run(self, count: int, seconds: float, only: tuple[str, ...] = ()) -> None:
        """Inject `count` faults, fewer if the time is over first; `only` names parts of names.

        Raises:
            RuntimeFailure: the stack did not mend, or a request hangs.
        """
        end = time.monotonic() + seconds
        faults = [
            f for f in list_faults(self._victim) if not only or any(part in f.name for part in only)
        ]
        todo: list[Fault] = []
        for number in range(count):
            if time.monotonic() > end:
                break
            if not todo:
                todo = random.Random(self._victim.dice.random()).sample(faults, len(faults))  # noqa: S311  # no secret
            self._strike(todo.pop(), number)

    def _strike(self, fault: Fault, number: int) -> None:
        time.sleep(self._victim.dice.uniform(0.0, 0.3))
        self._progress(f"{number + 1}: {fault.name}")
        outcome = self.outcomes.setdefault(fault.name, Outcome())
        outcome.injected += 1
        old = self._victim.processes().get(fault.replaces)
        started = time.monotonic()
        fault.inject(self._victim)
        alone, self._alone = self._alone, self._victim.dice.random() >= _TWICE
        if not self._alone:
            return
        self._await_mended(started, fault, old.pid if old is not None else 0)
        mended = time.monotonic()
        if alone:  # else it also shows what the fault before it did
            outcome.mended_s.append(mended - started)
            outcome.silences_s.append(self._load.silence_s(started, mended))
            if fault.replaces:
                start_s = self._starts.latest_s(fault.replaces)
                outcome.beyond_start_s.append(max(0.0, mended - started - start_s))

    def _await_mended(self, started: float, fault: Fault, ended: int) -> None:
        before = self._load.arrivals
        while (missing := self._missing(ended)) or not all(self._count_answers(before)):
            late = time.monotonic() - started > self._timeout_s
            if late or self._load.oldest_s > self._timeout_s:
                raise RuntimeFailure(
                    f"after {fault.name!r} the stack did not mend within {self._timeout_s:g} s: "
                    f"{missing or 'all processes are there'}; "
                    f"{sum(self._count_answers(before))} messages with tokens since then; "
                    f"the oldest request is {self._load.oldest_s:.0f} s old"
                )
            time.sleep(0.02)

    def _count_answers(self, before: list[int]) -> list[int]:
        """Messages with tokens that each client has had since then."""
        return [now - then for now, then in zip(self._load.arrivals, before, strict=True)]

    def _missing(self, ended: int) -> str:
        """What keeps the supervisor's processes, none of which is `ended`, from being a stack."""
        pids = {role: p.pid for role, p in self._victim.processes().items()}
        status = _status(self._victim)
        if ended in pids.values():
            return f"process {ended} has not been replaced"
        if set(pids) != set(self._victim.roles):
            return f"the supervisor has only {pids}"
        if status is None:
            return "the orchestrator does not answer"
        if {*pids.values()} & {*status.marked_for_kill}:
            return f"condemned processes are still there: {status.marked_for_kill}"
        here: dict[str, int] = {str(s.role): s.pid for s in status.services}
        known: dict[str, int] = {**here, "orchestrator": status.pid}
        known |= {role: pid for role, pid in pids.items() if role == "gateway"}
        return "" if known == pids else f"the orchestrator knows {known}, the supervisor {pids}"


def _status(victim: Victim) -> Status | None:
    client = Client(victim.run_dir.clients_address)
    try:
        return client.status(timeout_s=2.0)
    except (DeadlineExceeded, SsdError):
        return None
    finally:
        client.close()


def middle(values: list[float]) -> float:
    """The median; 0 of nothing."""
    return statistics.median(values) if values else 0.0
