"""How long bystanders wait while clients take all they can get: a part of `make hostile`.

Each attack runs for a while beside bystanders that stream short answers over HTTP; their longest
gap within a stream and their longest wait for a first token are compared with the goals.
"""

import contextlib
import http.client
import json
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

from launch.bench.http_load import DONE, events
from launch.terminal import console
from protocol.process.awake_clock import awake_time
from protocol.process.child import raise_descriptor_limit
from tests.chaos.crowd_attacks import ATTACKS, CHAT, HERE, Scene, chat

GAP_S = 2.0
"""Longest gap of a running stream that is allowed."""
FIRST_TOKEN_S = 5.0
STEP_S = 0.1
"""Longest step of the gateway's or the orchestrator's loop that is allowed: processor time."""
LOOPS = ("gateway", "orchestrator")
_LOOK_S = 5.0
_PAUSE_S = 3.0
_PATIENCE_S = 400.0


@dataclass
class Waits:
    """What the bystanders met beside one attack."""

    answers: int = 0
    gap_s: float = 0.0
    first_token_s: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)


class Bystanders:
    """Clients that stream short answers one after the other, and know what these must be."""

    def __init__(self, url: str, count: int, max_tokens: int) -> None:
        self._address = url.removeprefix("http://")
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._expected = [self._ask(number, Waits()) for number in range(count)]
        self.waits = Waits()
        self._open: dict[int, tuple[float, bool]] = {}
        """By bystander: when its last news came, and whether its stream has begun."""
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> Waits:
        """What was met since the last call; waits that go on are included."""
        with self._lock:
            for since, begun in self._open.values():
                self._note(self.waits, awake_time() - since, begun=begun)
            waits, self.waits = self.waits, Waits()
            return waits

    def end(self) -> None:
        """Let the last answers finish."""
        self._ending.set()
        for thread in self._threads:
            thread.join(FIRST_TOKEN_S)

    def _run(self, number: int) -> None:
        while not self._ending.is_set():
            text = self._ask(number, None)
            with self._lock:
                self._open.pop(number, None)
                if text == self._expected[number]:
                    self.waits.answers += 1
                else:
                    self.waits.failed[f"{text[:80]!r}"] += 1
            if text != self._expected[number]:
                self._ending.wait(0.1)

    @staticmethod
    def _note(waits: Waits, seconds: float, *, begun: bool) -> None:
        if begun:
            waits.gap_s = max(waits.gap_s, seconds)
        else:
            waits.first_token_s = max(waits.first_token_s, seconds)

    def _ask(self, number: int, waits: Waits | None, since: float = 0.0) -> str:
        body = chat(f"Bystander {number}.", max_tokens=self._max_tokens, stream=True, seed=number)
        connection = http.client.HTTPConnection(self._address, timeout=_PATIENCE_S)
        text, before, begun = "", since or awake_time(), False
        self._record(number, before, begun=False)
        with contextlib.closing(connection):
            try:
                connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status == 503:
                    time.sleep(0.2)
                    return self._ask(number, waits, before)
                if response.status != 200:
                    return f"HTTP {response.status}: {response.read(200)!r}"
                for data in events(response):
                    if data == DONE:
                        return text
                    event = json.loads(data)
                    if "error" in event:
                        return str(event)
                    text += "".join(c["delta"].get("content") or "" for c in event["choices"])
                    now = awake_time()
                    with self._lock:
                        self._note(waits or self.waits, now - before, begun=begun)
                    before, begun = now, True
                    self._record(number, before, begun=True)
            except (OSError, http.client.HTTPException) as error:
                return f"{type(error).__name__}: {error}"
        return f"cut off: {text}"

    def _record(self, number: int, at: float, *, begun: bool) -> None:
        if hasattr(self, "_open"):
            with self._lock:
                self._open[number] = at, begun


class Row(NamedTuple):
    """What one attack did to bystanders, and what it got itself."""

    name: str
    waits: Waits
    steps_s: dict[str, float]
    """Longest step of each loop."""
    statuses: Counter[int]

    @property
    def misses(self) -> list[str]:
        """The goals that were missed, in sentences."""
        waits = self.waits
        found = [f"beside {self.name}: {why}" for why in waits.failed]
        if self.statuses[500]:
            found.append(f"{self.name}: {self.statuses[500]} answers were 500")
        if waits.gap_s > GAP_S:
            found.append(f"beside {self.name} a stream paused for {waits.gap_s:.1f} s")
        if waits.first_token_s > FIRST_TOKEN_S:
            found.append(f"beside {self.name} a first token took {waits.first_token_s:.1f} s")
        for loop, seconds in self.steps_s.items():
            if seconds > STEP_S:
                found.append(f"beside {self.name} a step of the {loop} took {seconds:.2f} s")
        return found


def attack(url: str, context: int, *, seconds: float, max_tokens: int, only: str) -> Iterator[Row]:
    """Run one attack after the other beside bystanders.

    Args:
        url: of the gateway.
        context: tokens that the target can attend to.
        seconds: of each attack.
        max_tokens: of an answer to a bystander.
        only: a part of the names of the attacks to run.
    """
    scene = Scene(url, seconds, context)
    bystanders = Bystanders(url, 2, max_tokens)
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, spawn, raise_descriptor_limit) as elsewhere,
        ThreadPoolExecutor(1) as here,
    ):
        for name, run in ATTACKS.items():
            if only in name:
                time.sleep(_PAUSE_S)
                bystanders.take()
                place: Executor = here if run in HERE else elsewhere
                running = place.submit(run, scene)
                steps: dict[str, float] = dict.fromkeys(LOOPS, 0.0)
                while not running.done():
                    wait([running], _LOOK_S)
                    steps |= {loop: max(steps[loop], s) for loop, s in _read_steps(url).items()}
                yield Row(name, bystanders.take(), steps, running.result())
    bystanders.end()


def _read_steps(url: str) -> dict[str, float]:
    """Seconds of the longest step of each loop in the last ten seconds or more."""
    with contextlib.closing(
        http.client.HTTPConnection(url.removeprefix("http://"), timeout=_PATIENCE_S)
    ) as connection:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        page = response.read().decode()
    if response.status != HTTPStatus.OK:
        return {}  # the server is full: the next look tells
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {loop: float(values[f"ssd_{loop}_longest_step_seconds"]) for loop in LOOPS}


def print_head() -> None:
    """Begin the table."""
    console.write(
        "| beside | answers | longest gap, s | first token, s | step of gateway, s "
        "| of orchestrator, s | failed | statuses |\n|---|---|---|---|---|---|---|---|\n"
    )


def print_row(row: Row) -> None:
    """Add a row to the table."""
    waits, steps = row.waits, row.steps_s
    seen = ", ".join(f"{status}: {count}" for status, count in sorted(row.statuses.items()))
    failed = ", ".join(f"{why}: {count}" for why, count in waits.failed.items()) or "0"
    console.write(
        f"| {row.name} | {waits.answers} | {waits.gap_s:.2f} | {waits.first_token_s:.2f} "
        f"| {steps['gateway']:.3f} | {steps['orchestrator']:.3f} | {failed} | {seen} |\n"
    )
