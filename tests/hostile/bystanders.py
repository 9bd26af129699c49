"""Clients that ask the same thing again and again, and know what the answer must be."""

import contextlib
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from protocol.errors import SsdError
from protocol.messages import ChatMessage, Generate, Sampling, Text, Tokens
from tests.support.stack import PatientClient, eventually

_QUESTIONS = ("Name three rivers.", "def add(a, b):", "Say the same thing twice, twice.")
_SAMPLINGS = (Sampling(), Sampling(temperature=0.8, seed=11), Sampling(temperature=1.0, seed=3))
_TOKENS = 24


@dataclass
class Tally:
    """What the bystanders have seen."""

    answered: int = 0
    changed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    worst_wait_s: float = 0.0
    """Longest time without news in an answer, from its request on."""


class Bystanders:
    """Some clients, each in a thread of its own, within a `with` block."""

    def __init__(self, address: str, count: int = 2) -> None:
        self._address = address
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._expected = [self._ask(address, number)[0] for number in range(count)]
        self.tally = Tally()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(count)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def await_answers(self, count: int) -> None:
        """Return when this many more answers have ended."""
        wanted = self.tally.answered + count
        eventually(
            lambda: self.tally.answered >= wanted or bool(self.tally.failed), "bystanders go on"
        )

    def reset(self) -> Tally:
        """Begin to count anew; what was counted so far."""
        with self._lock:
            before, self.tally = self.tally, Tally()
        return before

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            try:
                tokens, wait_s = self._ask(self._address, number)
            except SsdError as error:
                with self._lock:
                    self.tally.failed.append(f"bystander {number}: {error}")
                continue
            with self._lock:
                self.tally.answered += 1
                self.tally.worst_wait_s = max(self.tally.worst_wait_s, wait_s)
                if tokens != self._expected[number]:
                    self.tally.changed.append(f"bystander {number}: {tokens}")

    @staticmethod
    def _ask(address: str, number: int) -> tuple[Tokens, float]:
        """The tokens of an answer, and the longest wait for any of them."""
        with contextlib.closing(PatientClient(address)) as client:
            request = Generate(
                request=client.number(),
                messages=[ChatMessage("user", _QUESTIONS[number % len(_QUESTIONS)])],
                sampling=_SAMPLINGS[number % len(_SAMPLINGS)],
                max_tokens=_TOKENS,
            )
            tokens: Tokens = []
            worst, before = 0.0, time.monotonic()
            for message in client.generate(request):
                now = time.monotonic()
                worst, before = max(worst, now - before), now
                if isinstance(message, Text):
                    tokens += message.tokens
            return tokens, worst
