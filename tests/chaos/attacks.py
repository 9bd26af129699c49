"""Hostile load: clients and drafters that send whatever may hurt the others, all the time."""

import contextlib
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.messages import ChatMessage, Generate
from tests.chaos.http_client import malform, never_reads
from tests.hostile.corpus import CORPUS
from tests.support import hostile_drafter

_TIMEOUT_S = 300.0
_DRAFTER_S = 1.5
_PAUSE_S = 0.02
"""Between two requests of one attacker."""
_LONGEST = 50_000
_HERE = 0.3
"""How often a whole list or object is replaced, not a value in it."""
_ALIKE = 0.6
"""How often by a value of the same type."""
_PATHS = (*["/v1/chat/completions"] * 6, "/v1/completions", "/v1/messages", "/v1/responses")

_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 10**400, 1e308, -1e-300, "", "\0", "\ud800", "x" * 5000,
    [], [[]], [None], {}, {"": {}}, {"type": "x"}, [{}] * 100, "{{ 7 * 7 }}", "\U0001f600" * 300,
)  # fmt: skip
"""What a field of a body is replaced by."""


@dataclass
class Attack:
    """What came of one kind of attack."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    """HTTP; 0 stands for a connection that was cut."""
    worst_s: float = 0.0
    """Longest time until it was answered."""
    failed: set[str] = field(default_factory=set)
    """The requests that were answered by a 5xx, and how."""


class Attackers:
    """Threads that attack until they are told to end."""

    def __init__(self, url: str, services: str, count: int, seed: int, *, drafters: bool) -> None:
        """`services`: the socket at which hostile drafters are started, one at a time."""
        self._address = url.removeprefix("http://")
        self._url = url
        self._services = services
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.attacks: dict[str, Attack] = {}
        runs: list[Callable[[random.Random], None]] = [self._ask_once] * count
        if drafters:
            runs.append(self._draft_once)
        self._threads = [
            threading.Thread(target=self._run, args=(run, seed + index), daemon=True)
            for index, run in enumerate(runs)
        ]
        for thread in self._threads:
            thread.start()

    def end(self, timeout_s: float) -> int:
        """Let the last attacks finish; how many attackers did not come back."""
        self._ending.set()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self, once: Callable[[random.Random], None], seed: int) -> None:
        dice = random.Random(seed)  # noqa: S311  # no secret
        while not self._ending.wait(_PAUSE_S):
            once(dice)

    def _ask_once(self, dice: random.Random) -> None:
        kind = dice.choice((*CORPUS, *CORPUS, "mutated", "mutated", "cancelled", "no HTTP", "deaf"))
        began, name, status = time.monotonic(), kind, 0
        match kind:
            case "no HTTP":
                malform(self._url, dice)
            case "deaf":
                never_reads(self._url, _question(dice), dice.random())
            case "cancelled":
                status = self._post(_PATHS[0], _stream(dice), cut=True)
            case "mutated":
                body = _mutate(dice)
                name = repr(body[:2000])
                status = self._post(dice.choice(_PATHS), body)
            case _:
                name, body = dice.choice(list(CORPUS[kind].items()))
                status = self._post(_PATHS[0], body)
        self._note(kind, name, status, time.monotonic() - began)

    def _draft_once(self, dice: random.Random) -> None:
        """A drafter that takes the place of the stack's own for a moment."""
        behaviour, began = dice.choice(hostile_drafter.BY_SOCKET), time.monotonic()
        program = [sys.executable, "-P", hostile_drafter.__file__, behaviour, self._services]
        subprocess.run(
            [*program, str(dice.randrange(2**31)), str(_DRAFTER_S)],
            check=False,
            timeout=_TIMEOUT_S,
            stderr=subprocess.DEVNULL,
        )
        self._note("drafter", behaviour, -1, time.monotonic() - began)
        self._ending.wait(dice.uniform(5.0, 25.0))

    def _note(self, kind: str, name: str, status: int, seconds: float) -> None:
        with self._lock:
            attack = self.attacks.setdefault(kind, Attack())
            attack.sent += 1
            if status >= 0:
                attack.statuses[status] += 1
            attack.worst_s = max(attack.worst_s, seconds)
            if status >= 500:  # the server's own failures
                attack.failed.add(f"{status}: {name}")

    def _post(self, path: str, body: bytes, *, cut: bool = False) -> int:
        """The status of the answer; 0 if the connection broke. `cut`: not read to its end."""
        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                response.read(64 if cut else None)
            except (OSError, http.client.HTTPException):
                return 0
            return response.status


def _question(dice: random.Random) -> Generate:
    return Generate(
        request=1, messages=[ChatMessage("user", "x" * dice.randrange(1, 200))], max_tokens=48
    )


def _stream(dice: random.Random) -> bytes:
    messages = [{"role": "user", "content": "y" * dice.randrange(1, 200)}]
    body = {"model": "default", "messages": messages, "max_tokens": 200, "stream": True}
    return json.dumps(body).encode()


def _mutate(dice: random.Random) -> bytes:
    """A body that is made of others: mixed, with values replaced, or with bytes exchanged."""
    kinds = list(CORPUS.values())
    one, other = (dice.choice([_stream(dice), *dice.choice(kinds).values()]) for _ in range(2))
    how = dice.choice(("mixed", "mixed", "replaced", "bytes"))
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        if how == "mixed":
            return json.dumps(json.loads(one) | json.loads(other)).encode()
        if how == "replaced":
            plain = json.loads(one[:_LONGEST])
            for _ in range(dice.randint(1, 3)):
                _replace(plain, dice)
            return json.dumps(plain).encode()
    data = bytearray(one[:_LONGEST])
    for _ in range(dice.randint(1, 3) if data else 0):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data)


def _replace(plain: Any, dice: random.Random) -> None:
    """Put something else in one place of a JSON value, at any depth."""
    while isinstance(plain, dict | list) and plain:
        key: Any = dice.choice(list(plain) if isinstance(plain, dict) else range(len(plain)))
        inner = plain[key]
        if not isinstance(inner, dict | list) or not inner or dice.random() < _HERE:
            plain[key] = _vary(inner, dice) if dice.random() < _ALIKE else dice.choice(_VALUES)
            return
        plain = inner


def _vary(value: Any, dice: random.Random) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return dice.choice((dice.random(), dice.randrange(300), -value))
        case str():
            letters = [chr(dice.choice((dice.randrange(1, 128), dice.randrange(0xA0, 0xD7FF))))]
            return value[: dice.randrange(len(value) + 1)] + "".join(letters * 3)
        case _:
            return value
