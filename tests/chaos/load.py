"""The load under which faults happen: clients that know what every answer must be."""

import contextlib
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from protocol.client.client import Client
from protocol.errors import SsdError
from protocol.messages import ChatMessage, Finished, Generate, Mode, Sampling, Text, Tokens
from tests.chaos.http_client import ask_http
from tests.support.stack import PatientClient

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
    text: str


@dataclass(frozen=True)
class Difference:
    """An answer that is not the undisturbed one."""

    request: Generate
    expected: Tokens
    tokens: Tokens


@dataclass
class Tally:
    """What the clients have seen."""

    answered: int = 0
    differences: list[Difference] = field(default_factory=list)
    cancelled: int = 0
    cut_off: int = 0
    """HTTP: streams that broke, so that the client knew; what had come was right."""
    turned_away: int = 0
    """HTTP: answered by a status that says to try again."""
    failed: list[str] = field(default_factory=list)
    messages: int = 0
    """How many had tokens."""
    arrivals: deque[float] = field(default_factory=lambda: deque(maxlen=20_000))
    """When the latest of them came."""

    def note_text(self) -> None:
        """A message with tokens."""
        self.messages += 1
        self.arrivals.append(time.monotonic())


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
                tally.note_text()
        elif isinstance(message, Finished) and message.reason == "cancelled":
            tokens.append(-1)  # nobody cancelled it: a change
    return tokens


def cases(address: str, max_tokens: int) -> list[Case]:
    """All requests of the load, with what plain decoding answers while nothing is wrong."""
    found: list[Case] = []
    with contextlib.closing(PatientClient(address)) as client:
        for question in _QUESTIONS:
            for sampling in _SAMPLINGS:
                plain = _request(client, question, sampling, "ar", max_tokens)
                answer = [m for m in client.generate(plain) if isinstance(m, Text)]
                expected = [token for message in answer for token in message.tokens]
                text = "".join(message.text for message in answer)
                found += [
                    Case(_request(client, question, sampling, mode, max_tokens), expected, text)
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
        self,
        address: str,
        known: list[Case],
        clients: int,
        seed: int,
        *,
        cancels: float = 0.0,
        url: str = "",
    ) -> None:
        """With a `url` there are as many clients more, which ask over HTTP."""
        self._cancels = cancels
        self._url = url
        self._direct = clients
        clients *= 2 if url else 1
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
        ask_once = self._ask_directly if index < self._direct else self._ask_over_http
        while not self._ending.is_set():
            self._since[index] = time.monotonic()
            ask_once(dice.choice(self._known), self.tallies[index], dice)

    def _ask_directly(self, case: Case, tally: Tally, dice: random.Random) -> None:
        cut = dice.randrange(len(case.expected)) if dice.random() < self._cancels else None
        with contextlib.closing(PatientClient(self._address)) as client:
            try:
                tokens = ask(client, case.request, tally, cut)
            except SsdError as error:
                tally.failed.append(str(error))
                return
        tally.answered += cut is None
        tally.cancelled += cut is not None
        expected = case.expected if cut is None else case.expected[: len(tokens)]
        if tokens != expected:
            tally.differences.append(Difference(case.request, expected, tokens))

    def _ask_over_http(self, case: Case, tally: Tally, dice: random.Random) -> None:
        """A stream may break with its gateway; then the client must know, and ask again."""
        del dice
        heard = ask_http(self._url, case.request, tally.note_text)
        tally.answered += heard.whole
        if heard.refused.startswith("HTTP 503"):
            tally.turned_away += 1
            time.sleep(0.2)
        elif heard.refused:
            tally.failed.append(heard.refused)
        elif not heard.whole and case.text.startswith(heard.text):
            tally.cut_off += 1
        elif heard.text != case.text:
            tally.failed.append(f"over HTTP: {heard.text!r} instead of {case.text!r}")

    @property
    def oldest_s(self) -> float:
        """Age of the oldest request that has not ended."""
        return time.monotonic() - min(self._since)

    @property
    def arrivals(self) -> list[int]:
        """Messages with tokens so far, by client."""
        return [tally.messages for tally in self.tallies]

    def silence_s(self, start: float, end: float) -> float:
        """The longest time between two messages of one client that touches this interval."""
        longest = 0.0
        for tally in self.tallies:
            arrivals = list(tally.arrivals)
            for before, after in pairwise(arrivals):
                if after >= start and before <= end:
                    longest = max(longest, after - before)
        return longest

    @property
    def quiet_s(self) -> float:
        """Since the last message of the client that has waited for longest."""
        now = time.monotonic()
        return max(
            (now - tally.arrivals[-1] for tally in self.tallies if tally.arrivals), default=0.0
        )

    def end(self, timeout_s: float) -> int:
        """Let the last answers finish; how many clients did not come back."""
        self._ending.set()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)
