"""The load of `ssd load --url`: concurrent requests to any OpenAI-compatible server.

One client for all servers, so that ours and others are measured alike: streamed chats of one
message, greedy, identified by their text.
"""

import http.client
import itertools
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import msgspec

from launch.bench.load import Load, LoadAnswer
from protocol.errors import RuntimeFailure, UsageError
from protocol.process.deadline import Deadline

_SILENCE_S = 300.0
"""Longest wait for a byte; a prompt may be queued for long."""
_TICK_S = 0.2
_CROWDED_S, _AGAIN_S = 10.0, 0.01
"""Time to retry a server that resets connections, and the interval between attempts."""
_LOOK_S = 1.0
"""Timeout of a health check."""
DONE = b"[DONE]"
"""Data of the last event."""
_PATHS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class Server:
    """An OpenAI-compatible server.

    Args:
        url: its address, with or without `/v1`.
        model: its name of the model; "" leaves that to the server.
        key: its API key, if it requires one.

    Raises:
        UsageError: the address is invalid.
    """

    def __init__(self, url: str, model: str = "", key: str = "") -> None:
        parts = urllib.parse.urlsplit(url)
        try:
            usable = parts.scheme in _PATHS and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is not a number
            usable = False
        if not usable:
            raise UsageError(f"--url {url!r} is not an address such as http://127.0.0.1:8080")
        self._connect: Callable[..., http.client.HTTPConnection] = _PATHS[parts.scheme]
        self._host = parts.netloc
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._path = f"{self._base}/v1/chat/completions"
        self._model = {"model": model} if model else {}
        self._headers = {"Content-Type": "application/json"}
        self.resets = list[str]()
        """One entry for each reset connection; the request was repeated."""
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def await_ready(self, longest_s: float, on_wait: Callable[[str], None]) -> None:
        """Wait until it is available and has a model.

        Args:
            longest_s: longest wait.
            on_wait: called once with the reason, if it is not ready at once.

        Raises:
            RuntimeFailure: it did not become available.
        """
        deadline, is_announced = Deadline(longest_s), False
        while (reason := self._absent(max(_LOOK_S, deadline.remaining))) is not None:
            if deadline.passed:
                raise RuntimeFailure(f"{self._host} was not ready within {longest_s:g} s: {reason}")
            if not is_announced:
                on_wait(f"waiting for {self._host}: {reason}")
            is_announced = True
            time.sleep(min(_TICK_S, deadline.remaining))

    def _absent(self, timeout_s: float) -> str | None:
        """Return why it is not ready; None if it is, or has no `/health`."""
        with closing(self._connect(self._host, timeout=timeout_s)) as connection:
            try:
                connection.request("GET", f"{self._base}/health", headers=self._headers)
                status = connection.getresponse().status
            except (OSError, http.client.HTTPException) as error:
                return f"{type(error).__name__}: {error}"
        return "it has no model yet" if status == http.client.SERVICE_UNAVAILABLE else None

    def load(self, mode: str, prompts: list[str], max_tokens: int, streams: int) -> Load:
        """Answer all prompts with this many requests in flight; raises RuntimeFailure."""
        fields = {"max_tokens": max_tokens, **({"draft_model": None} if mode == "ar" else {})}
        started = time.perf_counter()
        with ThreadPoolExecutor(streams) as pool:
            numbered = zip(itertools.count(), prompts, itertools.repeat(fields), strict=False)
            answers = list(pool.map(lambda entry: self._ask(*entry), numbered))
        return Load(mode, streams, time.perf_counter() - started, answers)

    def _ask(self, number: int, prompt: str, fields: dict[str, Any]) -> LoadAnswer:
        sent_at, first, pieces, tokens = time.perf_counter(), 0.0, list[str](), 0
        for chunk in self._chunks({**self._model, **fields, **_question(prompt)}):
            if usage := chunk.get("usage"):
                tokens = usage["completion_tokens"]
            for choice in chunk.get("choices", []):
                if piece := choice.get("delta", {}).get("content"):
                    first = first or time.perf_counter()
                    pieces.append(piece)
        if not tokens:
            raise RuntimeFailure(f"{self._host} sent no usage with its answer")
        ttft = (first or time.perf_counter()) - sent_at
        return LoadAnswer(number, "".join(pieces), tokens, ttft)

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of one streamed answer."""
        with closing(self._connect(self._host, timeout=_SILENCE_S)) as connection:
            try:
                response = self._post(connection, msgspec.json.encode(body))
                if response.status != http.client.OK:
                    error = response.read(2000).decode(errors="replace")
                    raise RuntimeFailure(f"{self._host} answered {response.status}: {error}")
                for data in events(response):
                    if data == DONE:
                        continue
                    chunk = msgspec.json.decode(data, type=dict[str, Any])
                    if "error" in chunk:
                        raise RuntimeFailure(f"{self._host} broke off: {chunk['error']}")
                    yield chunk
            except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise RuntimeFailure(f"{self._host} cannot be used: {reason}") from error

    def _post(
        self, connection: http.client.HTTPConnection, body: bytes
    ) -> http.client.HTTPResponse:
        """Return the beginning of the answer; retry if the connection is reset before it.

        Some servers, including mlx-lm's, queue only a few connecting clients.
        """
        deadline = Deadline(_CROWDED_S)
        while True:
            try:
                connection.request("POST", self._path, body, self._headers)
                return connection.getresponse()
            except ConnectionResetError as error:
                if deadline.passed or isinstance(error, http.client.RemoteDisconnected):
                    raise
                self.resets.append(self._host)
                connection.close()
                time.sleep(_AGAIN_S)


def events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the data of server-sent events; an incomplete last line is ignored."""
    while (line := response.readline()).endswith(b"\n"):
        if line.startswith(b"data:"):
            yield line.removeprefix(b"data:").strip()


def _question(prompt: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
