"""`ssd load`: concurrent requests to one stack, and to mlx-lm's batch generator."""

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median

import msgspec
from rich.table import Table

from launch.workers.reference import ReferenceWorker
from protocol.client.client import Client
from protocol.errors import RuntimeFailure
from protocol.jobs.reference import BatchDecodeRequest
from protocol.messages import Finished, Generate, Statistics, Text, Tokens

MLX_LM = "mlx-lm"
"""Not a mode: mlx-lm's batch generator, without a drafter, in a separate process."""


@dataclass
class LoadAnswer:
    """One answer."""

    prompt: int
    answer: Tokens | str
    """Its tokens, or its text if the server does not return tokens."""
    tokens: int
    ttft_s: float
    cached: int = 0
    statistics: Statistics | None = None


@dataclass
class Load:
    """All prompts, answered with a fixed number of requests in flight."""

    mode: str
    streams: int
    seconds: float
    """From the first request to the last answer's end, prefill included."""
    answers: list[LoadAnswer]

    @property
    def tok_s(self) -> float:
        """Tokens of all answers per second."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def by_prompt(self) -> dict[int, Tokens | str]:
        """The answers by prompt."""
        return {answer.prompt: answer.answer for answer in self.answers}


class _LoadClients:
    """Clients, one per stream, that share a list of requests."""

    def __init__(self, address: str, requests: Sequence[Generate]) -> None:
        self._address = address
        self._left: queue.SimpleQueue[tuple[int, Generate]] = queue.SimpleQueue()
        for entry in enumerate(requests):
            self._left.put(entry)
        self.answers: list[LoadAnswer] = []
        self.failures: list[Exception] = []

    def serve(self) -> None:
        """Send requests until none is left; run by each client's thread."""
        with closing(Client(self._address)) as client:
            while not self.failures:
                try:
                    number, request = self._left.get_nowait()
                    self.answers.append(_ask(client, number, request))
                except queue.Empty:
                    return
                # Catch everything: without this client's answers the others are meaningless.
                except Exception as error:  # noqa: BLE001  # `load_stack` raises it
                    self.failures.append(error)


def _ask(client: Client, number: int, request: Generate) -> LoadAnswer:
    sent_at, first, tokens = time.perf_counter(), 0.0, list[int]()
    for message in client.generate(msgspec.structs.replace(request, request=client.number())):
        match message:
            case Text():
                first = first or time.perf_counter()
                tokens += message.tokens
            case Finished():
                ttft = (first or time.perf_counter()) - sent_at
                cached, statistics = message.cached_tokens, message.statistics
                return LoadAnswer(number, tokens, len(tokens), ttft, cached, statistics)
    raise RuntimeFailure("an answer's stream ended without its last message")


def load_stack(address: str, requests: Sequence[Generate], streams: int) -> Load:
    """Answer the requests with `streams` clients; raise the error of the first failing request."""
    clients = _LoadClients(address, requests)
    threads = [threading.Thread(target=clients.serve, daemon=True) for _ in range(streams)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if clients.failures:
        raise clients.failures[0]
    return Load(requests[0].mode, streams, time.perf_counter() - started, clients.answers)


def load_mlx_lm(
    reference: ReferenceWorker,
    prompts: list[Tokens],
    streams: int,
    max_tokens: int,
    stop_ids: list[int],
) -> Load:
    """Answer the same prompts with mlx-lm."""
    answer = reference.decode_many(BatchDecodeRequest(prompts, max_tokens, stop_ids, streams))
    answers = [
        LoadAnswer(number, tokens, len(tokens), ttft_ms / 1e3)
        for number, (tokens, ttft_ms) in enumerate(zip(answer.tokens, answer.ttft_ms, strict=True))
    ]
    return Load(MLX_LM, streams, answer.seconds, answers)


def table(loads: Sequence[Load]) -> Table:
    """Build a table: one row per mode and number of streams; gains relative to one plain stream."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = ("mode", "streams", "tok/s", "x", "TTFT ms", "accept", "hits", "other tokens")
    for name in names:
        result.add_column(name, justify="left" if name == "mode" else "right")
    base = next((load for load in loads if (load.mode, load.streams) == ("ar", 1)), loads[0])
    for load in loads:
        statistics = [answer.statistics for answer in load.answers if answer.statistics]
        accepted, drafted = sum(s.accepted for s in statistics), sum(s.drafted for s in statistics)
        hits = sum(s.cache_hits for s in statistics)
        looked_up = hits + sum(s.cache_misses for s in statistics)
        different = sum(load.by_prompt[n] != base.by_prompt[n] for n in base.by_prompt)
        result.add_row(
            load.mode,
            str(load.streams),
            f"{load.tok_s:.1f}",
            f"{load.tok_s / base.tok_s:.2f}",
            # mlx-lm gets all prompts at once: its first tokens are delayed by the queue.
            f"{1e3 * median(answer.ttft_s for answer in load.answers):.0f}"
            if load.mode != MLX_LM
            else "-",
            f"{accepted / drafted:.2f}" if drafted else "-",
            f"{hits / looked_up:.2f}" if looked_up else "-",
            str(different),
        )
    return result
