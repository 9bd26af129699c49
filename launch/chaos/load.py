"""The load under which faults happen: clients that know what every answer must be."""

import contextlib
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from protocol.client import Client
from protocol.errors import SsdError
from protocol.messages import ChatMessage, Finished, Generate, Mode, Sampling, Text, Tokens

_QUESTIONS = (
    "Name three rivers and say where they flow.",
    "def add(a, b):",
    "Repeat this: the blue bird sings in the old tree, the blue bird sings.",
)
_SAMPLINGS = (Sampling(), Sampling(temperature=0.8, seed=11))
_MODES: tuple[Mode, ...] = ("ssd", "sd", "ar")


@dataclass(frozen=True)
class Case:
    """One request, and the tokens of its undisturbed answer."""

    request: Generate
    expected: Tokens


@dataclass
class Tally:
    """What the clients have seen."""

    answered: int = 0
    changed: int = 0
    cancelled: int = 0
    failed: list[str] = field(default_factory=list)
    messages: int = 0
    """How many had tokens."""
    arrivals: deque[float] = field(default_factory=lambda: deque(maxlen=20_000))
    """When the latest of them came."""


def ask(
    client: Client, request: Generate, tally: Tally | None = None, cut: int | None = None
) -> Tokens:
    """The tokens of an answer, cancelled after `cut`; raises SsdError if it fails."""
    tokens: Tokens = []
    for message in client.generate(request):
        if cut is not None and len(tokens) > cut:
            break
        if isinstance(message, Text):
            tokens += message.tokens
            if tally is not None:
                tally.messages += 1
                tally.arrivals.append(time.monotonic())
        elif isinstance(message, Finished) and message.reason == "cancelled":
            tokens.append(-1)  # nobody cancelled it: a change
    return tokens


def cases(address: str, max_tokens: int) -> list[Case]:
    """All requests of the load, with what plain decoding answers while nothing is wrong."""
    found: list[Case] = []
    with contextlib.closing(Client(address)) as client:
        for question in _QUESTIONS:
            for sampling in _SAMPLINGS:
                plain = _request(client, question, sampling, "ar", max_tokens)
                expected = ask(client, plain)
                found += [
                    Case(_request(client, question, sampling, mode, max_tokens), expected)
                    for mode in _MODES
                ]
    return found


def _request(
    client: Client, question: str, sampling: Sampling, mode: Mode, max_tokens: int
) -> Generate:
    return Generate(
        request=client.number(),
        messages=[ChatMessage("user", question)],
        sampling=sampling,
        max_tokens=max_tokens,
        mode=mode,
    )


class Load:
    """Clients in threads that ask all the time and compare token by token."""

    def __init__(
        self, address: str, known: list[Case], clients: int, seed: int, cancels: float = 0.0
    ) -> None:
        self._cancels = cancels
        self._address = address
        self._known = known
        self._ending = threading.Event()
        self.tallies = [Tally() for _ in range(clients)]
        self._since = [0.0 for _ in range(clients)]
        self._threads = [
            threading.Thread(target=self._run, args=(index, seed + index), daemon=True)
            for index in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, seed: int) -> None:
        dice = random.Random(seed)  # noqa: S311  # no secret
        tally = self.tallies[index]
        while not self._ending.is_set():
            with contextlib.closing(Client(self._address)) as client:
                case = dice.choice(self._known)
                self._since[index] = time.monotonic()
                cut = dice.randrange(len(case.expected)) if dice.random() < self._cancels else None
                try:
                    tokens = ask(client, case.request, tally, cut)
                except SsdError as error:
                    tally.failed.append(str(error))
                    continue
                tally.answered += cut is None
                tally.cancelled += cut is not None
                expected = case.expected if cut is None else case.expected[: len(tokens)]
                tally.changed += tokens != expected

    @property
    def oldest_s(self) -> float:
        """Age of the oldest request that has not ended."""
        return time.monotonic() - min(self._since)

    @property
    def arrivals(self) -> int:
        """Messages with tokens so far."""
        return sum(tally.messages for tally in self.tallies)

    def silence_s(self, start: float, end: float) -> float:
        """The longest time between two messages of one client that touches this interval."""
        longest = 0.0
        for tally in self.tallies:
            arrivals = list(tally.arrivals)
            for before, after in pairwise(arrivals):
                if after >= start and before <= end:
                    longest = max(longest, after - before)
        return longest

    def end(self, patience_s: float) -> int:
        """Let the last answers finish; how many clients did not come back."""
        self._ending.set()
        end = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)
