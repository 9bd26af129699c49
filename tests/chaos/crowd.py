"""`python -m tests.chaos crowd`: how long bystanders wait while clients take all they can get.

Each attack runs for a while beside bystanders that stream short answers over HTTP; their longest
gap within a stream and their longest wait for a first token are compared with the goals.
"""

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import click
import msgspec
import psutil

from launch.bench.http_load import DONE, events
from launch.settings.flags import Command
from launch.settings.options import settings_of, stack_options
from launch.stack.session import private_stack
from launch.terminal import console
from protocol.errors import RuntimeFailure
from protocol.process.child import raise_descriptor_limit

GAP_S = 2.0
"""Longest gap of a running stream that is allowed."""
FIRST_TOKEN_S = 5.0
_CHAT = "/v1/chat/completions"
_PATIENCE_S = 400.0
_BODY = 4 * 1024**2 - 4096


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
                self._note(self.waits, time.monotonic() - since, begun=begun)
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
        text, before, begun = "", since or time.monotonic(), False
        self._record(number, before, begun=False)
        with contextlib.closing(connection):
            try:
                connection.request("POST", _CHAT, body, {"Content-Type": "application/json"})
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
                    now = time.monotonic()
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


def chat(text: str, **fields: Any) -> bytes:
    """A body of the chat API."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return json.dumps(body).encode()


# ------------------------------------------------------------ attacks


@dataclass(frozen=True)
class Scene:
    """Where an attack takes place."""

    url: str
    seconds: float

    def connect(self) -> socket.socket:
        """A bare connection."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), 10.0)

    def post(self, body: bytes, path: str = _CHAT, **headers: str) -> int:
        """The status of an answer that is read to its end; 0 if there is none."""
        address = self.url.removeprefix("http://")
        given = {"Content-Type": "application/json", **headers}
        with contextlib.closing(http.client.HTTPConnection(address, timeout=60.0)) as connection:
            try:
                connection.request("POST", path, body, given)
                response = connection.getresponse()
                response.read()
            except (OSError, http.client.HTTPException):
                return 0
            return response.status

    @contextlib.contextmanager
    def unread(self, body: bytes) -> Iterator[socket.socket]:
        """A request whose answer is never read; it is cancelled at the end."""
        head = (
            f"POST {_CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with contextlib.closing(self.connect()) as connection:
            connection.sendall(head.encode() + body)
            yield connection


Attack = Callable[[Scene], Counter[int]]


def _unread(scene: Scene, bodies: list[bytes]) -> Counter[int]:
    with contextlib.ExitStack() as stack:
        for body in bodies:
            stack.enter_context(scene.unread(body))
        time.sleep(scene.seconds)
    return Counter()


def _at_once(scene: Scene, bodies: list[bytes], path: str = _CHAT) -> Counter[int]:
    """Post these bodies, each in a thread of its own, again and again."""
    statuses: Counter[int] = Counter()
    end = time.monotonic() + scene.seconds

    def post(body: bytes) -> None:
        while time.monotonic() < end:
            status = scene.post(body, path)
            statuses[status] += 1
            time.sleep(0.02)

    threads = [threading.Thread(target=post, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def long_answers(scene: Scene) -> Counter[int]:
    """Eight requests for sixteen answers of 8,000 tokens each."""
    fields = {"n": 16, "max_tokens": 8000, "stream": True, "temperature": 1}
    return _unread_but_read(scene, [chat(f"Tell me all. {i}", **fields) for i in range(8)])


def many_requests(scene: Scene) -> Counter[int]:
    """Sixty requests for one long answer each."""
    fields = {"max_tokens": 8000, "stream": True, "temperature": 1}
    return _unread_but_read(scene, [chat(f"Tell me all. {i}", **fields) for i in range(60)])


def _unread_but_read(scene: Scene, bodies: list[bytes]) -> Counter[int]:
    """Streams that are read as they come, until the time is over."""
    end = time.monotonic() + scene.seconds
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(scene.unread(body)) for body in bodies]
        for connection in itertools.cycle(connections):
            if time.monotonic() > end:
                return Counter()
            connection.settimeout(0.005)
            with contextlib.suppress(OSError):
                connection.recv(1 << 16)
    return Counter()


def unread_logprobs(scene: Scene) -> Counter[int]:
    """Streams with twenty log-probabilities a token that nobody reads."""
    fields = {"n": 16, "max_tokens": 8000, "stream": True, "logprobs": True, "top_logprobs": 20}
    return _unread(scene, [chat(f"Tell me all. {i}", **fields) for i in range(8)])


def long_prompts(scene: Scene) -> Counter[int]:
    """Prompts that nearly fill the context, eight at a time, with sixteen answers each."""
    return _at_once(scene, [chat(f"{i} " * 900, n=16, max_tokens=64) for i in range(8)])


def conversations(scene: Scene) -> Counter[int]:
    """Bodies of 4 MB with 4,096 messages, for sixteen answers."""
    text = "x" * (_BODY // 4096 - 40)
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(4095)]
    bodies = []
    for number in range(4):
        messages = [*turns, {"role": "user", "content": str(number)}]
        bodies.append(json.dumps({"messages": messages, "n": 16}, separators=(",", ":")).encode())
    return _at_once(scene, bodies)


def small_chunks(scene: Scene) -> Counter[int]:
    """Bodies in chunks of one byte."""
    head = (
        f"POST {_CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()
    end = time.monotonic() + scene.seconds

    def send() -> None:
        while time.monotonic() < end:
            with contextlib.suppress(OSError), contextlib.closing(scene.connect()) as connection:
                connection.settimeout(1.0)
                connection.sendall(head + b'2\r\n{"\r\n')
                while time.monotonic() < end:
                    connection.sendall(b"1\r\nx\r\n" * 10_000)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter()


def unknown_items(scene: Scene) -> Counter[int]:
    """Lists of more than a million items, in fields that are known and in others."""
    items = b"[" + b"{}," * (_BODY // 3 - 100) + b"{}]"
    places = (b'"x":%b', b'"tools":%b', b'"stop":%b', b'"tool_choice":{"x":%b}', b'"metadata":%b')
    head = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,'
    bodies = [head + place % items + b"}" for place in places]
    bodies.append(b'{"messages":[{"role":"user","content":' + items + b"}]}")
    bodies.append(b'{"messages":' + items + b"}")
    return _at_once(scene, (bodies * 3)[:16])


def nested(scene: Scene) -> Counter[int]:
    """Values nested hundreds of levels deep, with 150,000 unknown items at the bottom."""
    bodies = []
    items = "[" + '{"u":1},' * 150_000 + "0]"
    for depth in (60, 200, 400, 900):
        for opening, closing in (('{"a":', "}"), ("[", "]")):
            value = opening * depth + items + closing * depth
            for place in ('"x":%s', '"chat_template_kwargs":{"x":%s}', '"tools":%s'):
                body = '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,'
                bodies.append((body + place % value + "}").encode())
    return _at_once(scene, bodies[:16])


def idle_connections(scene: Scene) -> Counter[int]:
    """1,100 connections that say nothing, or half of a head."""
    counts: Counter[int] = Counter()
    with contextlib.ExitStack() as stack:
        for number in range(1100):
            with contextlib.suppress(OSError):
                connection = stack.enter_context(contextlib.closing(scene.connect()))
                if number % 2:
                    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127")
                counts[0] += 1
        time.sleep(scene.seconds)
    return counts


def half_bodies(scene: Scene) -> Counter[int]:
    """1,100 connections whose bodies never come to their end."""
    counts: Counter[int] = Counter()
    head = (
        f"POST {_CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        "Content-Length: 1000\r\n\r\n{"
    ).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            with contextlib.suppress(OSError):
                connection = stack.enter_context(contextlib.closing(scene.connect()))
                connection.sendall(head)
                counts[0] += 1
        time.sleep(scene.seconds)
    return counts


def health(scene: Scene) -> Counter[int]:
    """2,500 questions for the health at once."""
    statuses: Counter[int] = Counter()
    lines = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    end = time.monotonic() + scene.seconds
    while time.monotonic() < end:
        with contextlib.ExitStack() as stack:
            opened = []
            for _ in range(2500):
                try:
                    one = stack.enter_context(contextlib.closing(scene.connect()))
                    one.sendall(lines)
                    opened.append(one)
                except OSError:
                    statuses[0] += 1
            for one in opened:
                one.settimeout(20.0)
                try:
                    statuses[int([*one.recv(64).split(b" "), b"0", b"0"][1] or 0)] += 1
                except (OSError, ValueError):
                    statuses[0] += 1
    return statuses


def helpers(scene: Scene) -> Counter[int]:
    """Helper processes are killed and stopped while requests need them."""
    end = time.monotonic() + scene.seconds
    ending = threading.Event()

    def strike() -> None:
        numbers = itertools.cycle((signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL))
        while not ending.wait(0.7):
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    line = " ".join(child.cmdline())
                    if "grammar_worker" in line or "prompt_worker" in line:
                        os.kill(child.pid, next(numbers))

    striker = threading.Thread(target=strike)
    striker.start()
    statuses: Counter[int] = Counter()
    numbers = itertools.count()
    while time.monotonic() < end:
        number = next(numbers)
        schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        statuses[scene.post(chat("x", max_tokens=4, response_format=form))] += 1
        statuses[scene.post(chat(f"{number} " * 3000, max_tokens=4))] += 1
    ending.set()
    striker.join()
    return statuses


ATTACKS: dict[str, Attack] = {
    "eight times sixteen answers of 8,000 tokens": long_answers,
    "sixty long answers": many_requests,
    "log-probabilities that are not read": unread_logprobs,
    "long prompts, sixteen answers each": long_prompts,
    "4,096 messages in 4 MB, sixteen answers": conversations,
    "chunks of one byte": small_chunks,
    "a million items": unknown_items,
    "deep nesting": nested,
    "1,100 idle connections": idle_connections,
    "1,100 bodies that do not end": half_bodies,
    "2,500 questions for the health": health,
    "helpers killed and stopped": helpers,
}


@click.command("crowd", cls=Command)
@stack_options()
@click.option("--seconds", type=click.FloatRange(min=1.0), default=20.0, show_default=True)
@click.option("--bystanders", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("-m", "--max-tokens", type=click.IntRange(min=1), default=48, show_default=True)
@click.option("--only", default="", help="Attacks whose name contains this.")
def command(**options: Any) -> None:
    """Let a crowd ask for everything at once, and measure how long others wait."""
    seconds, count = options.pop("seconds"), options.pop("bystanders")
    max_tokens, only = options.pop("max_tokens"), options.pop("only")
    settings = msgspec.structs.replace(settings_of(**options), http=True, port=0)
    raise_descriptor_limit()
    misses: list[str] = []
    console.write("| beside | answers | longest gap, s | first token, s | failed | statuses |\n")
    console.write("|---|---|---|---|---|---|\n")
    with private_stack(settings, console.report_trouble) as supervisor:
        if supervisor.listener is None:
            raise AssertionError("a stack with HTTP has a listener")
        url = supervisor.listener.url
        bystanders = Bystanders(url, count, max_tokens)
        time.sleep(seconds)
        _print("nothing", bystanders.take(), Counter())
        for name, attack in ATTACKS.items():
            if only not in name:
                continue
            bystanders.take()
            statuses = attack(Scene(url, seconds))
            waits = bystanders.take()
            _print(name, waits, statuses)
            misses += _find_misses(name, waits, statuses)
            time.sleep(3.0)
        bystanders.end()
    if misses:
        raise RuntimeFailure("; ".join(misses))


def _print(name: str, waits: Waits, statuses: Counter[int]) -> None:
    seen = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    failed = ", ".join(f"{why}: {count}" for why, count in waits.failed.items()) or "0"
    console.write(
        f"| {name} | {waits.answers} | {waits.gap_s:.2f} | {waits.first_token_s:.2f} "
        f"| {failed} | {seen} |\n"
    )


def _find_misses(name: str, waits: Waits, statuses: Counter[int]) -> list[str]:
    misses = [f"beside {name}: {why}" for why in waits.failed]
    if statuses[500]:
        misses.append(f"{name}: {statuses[500]} answers were 500")
    if waits.gap_s > GAP_S:
        misses.append(f"beside {name} a stream paused for {waits.gap_s:.1f} s")
    if waits.first_token_s > FIRST_TOKEN_S:
        misses.append(f"beside {name} a first token took {waits.first_token_s:.1f} s")
    return misses
