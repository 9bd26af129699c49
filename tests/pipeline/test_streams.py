"""Several requests at once on real processes: each gets the tokens that it gets alone."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from launch.settings.settings import StackSettings
from protocol.errors import Busy
from protocol.messages import (
    Cancel,
    ChatMessage,
    Finished,
    FromOrchestrator,
    Generate,
    Mode,
    Sampling,
    Text,
    Tokens,
)
from protocol.transport.channel import Channel
from protocol.transport.codec import Decoder
from tests.support.stack import (
    DEADLINE_S,
    PatientClient,
    RunningStack,
    eventually,
    held,
    running,
    unwatched_stops,
)
from tests.support.tiny_models import write_endless_model

pytestmark = pytest.mark.processes

LENGTH = 40
LAWS = [
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.0, top_p=0.9, seed=2),
    Sampling(temperature=0.8, seed=3),
]
PROMPTS: list[Tokens] = [
    [0, 2, 97, 41, 250, 33],
    [0, 2, 97, 41, 11, 12, 13],
    [77],
    [5, 120, 31, 88, 160, 3] * 9,
    [0, 2, 97, 41, 250, 33, 8, 9],
    [64, 5],
]


def requests(mode: Mode) -> list[Generate]:
    return [
        Generate(
            request=0,
            tokens=prompt,
            sampling=LAWS[n % 4],
            max_tokens=LENGTH - 3 * n,
            mode=mode,
            # Fixed by hand for half of them: the others may find that plain decoding is faster.
            num_draft_tokens=3 * (n % 2) if mode != "ar" else 0,
        )
        for n, prompt in enumerate(PROMPTS)
    ]


class Asking(threading.Thread):
    """One client with one request."""

    def __init__(self, address: str, request: Generate, when: Callable[[int], None]) -> None:
        super().__init__(daemon=True)
        self._address, self._request, self._when = address, request, when
        self.tokens: Tokens = []
        self.finished: Finished | None = None

    def run(self) -> None:
        with closing(PatientClient(self._address)) as client:
            for message in client.generate(msgspec.structs.replace(self._request, request=1)):
                if isinstance(message, Text):
                    self.tokens += message.tokens
                    self._when(len(self.tokens))
                else:
                    self.finished = message


def all_at_once(
    stack: RunningStack, asked: list[Generate], when: Callable[[int], None] = lambda tokens: None
) -> list[Asking]:
    address = stack.supervisor.run_dir.clients_address
    threads = [Asking(address, request, when) for request in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert thread.finished is not None
    return threads


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A tiny pair that agrees on most tokens; three are decoded at a time, two may wait."""
    base = tmp_path_factory.mktemp("m")
    target = write_endless_model(base / "t", "sliding", seed=1)
    draft = write_endless_model(base / "d", "sliding", seed=1, layers=2, noise=0.01)
    settings = StackSettings(
        model=str(target),
        draft_model=str(draft),
        decode_concurrency=3,
        max_waiting=3,
        hang_timeout_s=DEADLINE_S,
    )
    with unwatched_stops(), running(settings) as started:
        yield started


@pytest.fixture(scope="module")
def alone(stack: RunningStack) -> list[Tokens]:
    """The answers of plain decoding, one after the other."""
    return [thread.tokens for one in requests("ar") for thread in all_at_once(stack, [one])]


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_requests_at_once_get_the_tokens_they_get_alone(
    stack: RunningStack, alone: list[Tokens], mode: Mode
) -> None:
    """Prompts, laws, seeds and lengths of their own, more than are decoded at a time."""

    def accepted() -> int:
        answers = all_at_once(stack, requests(mode))
        assert alone == [thread.tokens for thread in answers]
        return sum(one.finished.statistics.accepted for one in answers if one.finished)

    if mode == "ar":
        assert accepted() == 0
    else:
        eventually(lambda: accepted() > 0, "drafts come in time")


@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_a_death_costs_no_token_of_anybody(
    stack: RunningStack, alone: list[Tokens], role: str
) -> None:
    """SIGKILL of a service while several requests stream: all go on, unchanged."""
    killed = threading.Event()

    def kill(tokens: int) -> None:
        if tokens >= 6 and not killed.is_set():
            killed.set()
            os.kill(stack.pid(role), signal.SIGKILL)

    # The callback asks for the pid on the stack's own client, one thread at a time.
    lock = threading.Lock()

    def guarded(tokens: int) -> None:
        with lock:
            kill(tokens)

    answers = all_at_once(stack, requests("ssd"), guarded)
    assert killed.is_set()
    assert alone == [thread.tokens for thread in answers]
    eventually(lambda: len(stack.client.status().services) == 2, "both services again")


def test_a_second_turn_is_cached(stack: RunningStack) -> None:
    """The tokens of the first turn, and of a cancelled request, need not be computed again."""
    prompt: Tokens = [7, 9, 200, 13, 14, 15, 16, 17, 18, 19]
    first = stack.answer("", tokens=prompt, max_tokens=10)
    again = Generate(request=0, tokens=[*prompt, *first.tokens, 50, 51], max_tokens=5)
    [second] = all_at_once(stack, [again])
    assert second.finished is not None
    assert second.finished.cached_tokens == len(prompt) + 9
    client = stack.client
    request = Generate(
        request=client.number(), tokens=[*prompt[:4], 99, 98, 97], max_tokens=20_000, mode="ar"
    )
    answer = client.generate(request)
    text = next(answer)
    assert isinstance(text, Text)
    answer.close()  # cancels
    eventually(lambda: client.status().active == 0, "the request is cancelled")
    [third] = all_at_once(stack, [msgspec.structs.replace(request, max_tokens=2)])
    assert third.finished is not None
    assert third.finished.cached_tokens == 6


def test_the_line_is_bounded_and_can_be_left(stack: RunningStack) -> None:
    """Three are decoded and three wait; the next is turned away as busy; leaving makes room."""
    address = stack.supervisor.run_dir.clients_address
    long = Generate(request=0, tokens=[3, 4, 5], max_tokens=20_000, mode="ar")
    crowd: Channel[FromOrchestrator] = Channel(address, Decoder(FromOrchestrator))
    with crowd, closing(PatientClient(address)) as other, held(stack, "verifier"):
        for number in range(1, 7):
            crowd.send(msgspec.structs.replace(long, request=number))
        eventually(lambda: stack.client.status().waiting == 3, "three wait")
        with pytest.raises(Busy, match="try again later"):
            list(other.generate(msgspec.structs.replace(long, request=other.number())))
        for number in range(6, 0, -1):
            crowd.send(Cancel(request=number))
        eventually(lambda: stack.client.status().active == 0, "all are cancelled")
    assert stack.client.status().waiting == 0


@pytest.mark.model
def test_the_real_pair_serves_four(tmp_path: Path) -> None:
    """The default pair, four different laws at once: the tokens that each law gives alone."""
    del tmp_path
    texts = ["Name three rivers.", "Write a haiku.", "def add(a, b):", "What is 7 times 8?"]
    asked = [
        Generate(request=0, messages=[ChatMessage("user", text)], sampling=law, max_tokens=24)
        for text, law in zip(texts, LAWS, strict=True)
    ]
    with running(StackSettings()) as stack:
        together = [thread.tokens for thread in all_at_once(stack, asked)]
        plain = [msgspec.structs.replace(one, mode="ar") for one in asked]
        one_by_one = [all_at_once(stack, [one])[0].tokens for one in plain]
    assert one_by_one == together


@pytest.mark.parametrize("kv_bytes", [0, 1 << 20])
def test_requests_in_turn_get_the_tokens_of_plain_decoding(tmp_path: Path, kv_bytes: int) -> None:
    """Three clients share one place; a MiB of KV holds one of them, so the others are rebuilt."""
    target = write_endless_model(tmp_path / "t", "llama", seed=1)
    draft = write_endless_model(tmp_path / "d", "llama", seed=1, layers=2, noise=0.01)
    settings = StackSettings(
        model=str(target), draft_model=str(draft), decode_concurrency=1, kv_bytes=kv_bytes
    )
    order: list[str] = []

    def ask(client: str, mode: Mode) -> Generate:
        law, prompt = LAWS[ord(client) % len(LAWS)], [*PROMPTS[0], ord(client)]
        return Generate(
            request=0, tokens=prompt, sampling=law, max_tokens=900, mode=mode, client=client
        )

    def note(client: str) -> Callable[[int], None]:
        return lambda _: order.append(client)

    with running(settings) as stack:
        alone = [all_at_once(stack, [ask(client, "ar")])[0].tokens for client in "abc"]
        address = stack.supervisor.run_dir.clients_address
        together = [Asking(address, ask(client, "ssd"), note(client)) for client in "abc"]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join(DEADLINE_S)
    assert [thread.tokens for thread in together] == alone
    assert sum(one != before for one, before in pairwise(order)) > 2
