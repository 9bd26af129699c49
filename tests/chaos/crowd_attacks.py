"""Clients that take all they can get: each attack lasts a while, and returns the statuses seen."""

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
from dataclasses import dataclass
from typing import Any

import psutil

from tests.chaos.lid import close_lid

CHAT = "/v1/chat/completions"
_BODY = 4 * 1024**2 - 4096
_LONGEST_PROMPT = 20_000
_CLOSED_S = 15.0


def chat(text: str, **fields: Any) -> bytes:
    """A body of the chat API."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return json.dumps(body).encode()


@dataclass(frozen=True)
class Scene:
    """Where an attack takes place."""

    url: str
    seconds: float
    context: int
    """Tokens that the target can attend to."""

    def connect(self) -> socket.socket:
        """A bare connection."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), 10.0)

    def post(self, body: bytes, path: str = CHAT, **headers: str) -> int:
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
            f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
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


def _at_once(scene: Scene, bodies: list[bytes], path: str = CHAT) -> Counter[int]:
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
    """Eight requests for 128 answers of 8,000 tokens each."""
    fields = {"n": 128, "max_tokens": 8000, "stream": True, "temperature": 1}
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
    fields = {"n": 128, "max_tokens": 8000, "stream": True, "logprobs": True, "top_logprobs": 20}
    return _unread(scene, [chat(f"Tell me all. {i}", **fields) for i in range(8)])


def long_prompts(scene: Scene) -> Counter[int]:
    """Prompts that fill three quarters of the context, eight at a time, for 128 answers."""
    words = _count_words(scene, min(_LONGEST_PROMPT, 3 * scene.context // 4))
    return _at_once(scene, [chat(f"{i} " * words, n=128, max_tokens=64) for i in range(8)])


def _count_words(scene: Scene, tokens: int) -> int:
    """Words that make a prompt of so many tokens."""
    counts = []
    for words in (10, 110):
        connection = http.client.HTTPConnection(scene.url.removeprefix("http://"), timeout=60.0)
        body = chat("1 " * words, model="default_model")
        with contextlib.closing(connection):
            kind = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/messages/count_tokens", body, kind)
            counts.append(json.load(connection.getresponse())["input_tokens"])
    return max(1, 100 * (tokens - counts[0]) // max(1, counts[1] - counts[0]))


def conversations(scene: Scene) -> Counter[int]:
    """Bodies of 4 MB with 4,096 messages, for 128 answers."""
    text = "x" * (_BODY // 4096 - 40)
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(4095)]
    bodies = []
    for number in range(4):
        messages = [*turns, {"role": "user", "content": str(number)}]
        bodies.append(json.dumps({"messages": messages, "n": 128}, separators=(",", ":")).encode())
    return _at_once(scene, bodies)


def small_chunks(scene: Scene) -> Counter[int]:
    """Bodies in chunks of one byte."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
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
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
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


def leavers(scene: Scene) -> Counter[int]:
    """Requests for 128 answers whose clients leave at once."""
    body = chat("Tell me all.", n=128, max_tokens=400, stream=True)
    end = time.monotonic() + scene.seconds

    def ask() -> None:
        while time.monotonic() < end:
            with contextlib.suppress(OSError), scene.unread(body):
                pass

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter()


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
                    if "text worker" in line:
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


def lid(scene: Scene) -> Counter[int]:
    """All processes stop for a while, these clients too, and go on."""
    time.sleep(scene.seconds / 4)
    close_lid(_CLOSED_S)
    time.sleep(scene.seconds / 4)
    return Counter()


ATTACKS: dict[str, Attack] = {
    "eight times 128 answers of 8,000 tokens": long_answers,
    "sixty long answers": many_requests,
    "log-probabilities that are not read": unread_logprobs,
    "long prompts, 128 answers each": long_prompts,
    "4,096 messages in 4 MB, 128 answers": conversations,
    "chunks of one byte": small_chunks,
    "a million items": unknown_items,
    "deep nesting": nested,
    "1,100 idle connections": idle_connections,
    "1,100 bodies that do not end": half_bodies,
    "2,500 questions for the health": health,
    "clients that leave at once": leavers,
    "helpers killed and stopped": helpers,
    "all processes stopped for 15 s": lid,
}
HERE = {helpers, lid}
"""They look for the children of the process that they run in."""
