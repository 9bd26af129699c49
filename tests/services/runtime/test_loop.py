"""The loop of every service, over real sockets: one end in a thread, the other in the test."""

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import msgspec
import pytest

from protocol.errors import (
    DeadlineExceeded,
    ModelError,
    OutOfMemory,
    ProtocolError,
    RuntimeFailure,
)
from protocol.messages import (
    PROTOCOL_VERSION,
    CloseSequence,
    DraftTree,
    Failed,
    FromService,
    Heartbeat,
    Hello,
    Identify,
    Message,
    OpenSequence,
    Prefilled,
    Prepare,
    Rejected,
    Sampling,
    Stop,
    ToService,
    VerificationOutcome,
    Verify,
    Welcome,
)
from protocol.transport.address import ipc_address
from protocol.transport.channel import Channel, Hub
from protocol.transport.codec import Decoder
from services.runtime.inbox import Work
from services.runtime.loop import Identity, _stamp, serve

PATIENCE_S = 60.0

IDENTITY = Identity(
    role="drafter",
    backend="fake",
    model="/models/fake",
    tokenizer_fingerprint="abc",
    vocabulary_size=288,
    context_length=512,
    compute_unit="cpu",
    max_draft_tokens=64,
)


def prepare(round_: int, *, sequence: int = 1, depth: int = 3) -> Prepare:
    return Prepare(
        sequence=sequence, round=round_, base=0, tokens=[], nodes=[1], fan_out=[1], depth=depth
    )


def opening(sequence: int) -> OpenSequence:
    return OpenSequence(sequence=sequence, tokens=[1, 2], sampling=Sampling())


class FakeService:
    """Answers `Prepare` with trees of its depth, with a step of the test's between two.

    An `OpenSequence` of n tokens may be abandoned n - 2 times before it is answered.
    """

    def __init__(self) -> None:
        self.handled: list[Work] = []
        self.ended: list[Work] = []
        self.stubborn = False
        self.patience: Callable[[Work], float] = lambda message: 0.0
        self.before_answer: Callable[[Work, int], None] = lambda message, number: None

    def handle(self, message: Work) -> Generator[FromService | None]:
        self.handled.append(message)
        try:
            for number, answer in enumerate(self._answers(message)):
                self.before_answer(message, number)
                yield answer
        finally:
            self.ended.append(message)

    def supersedes(self, news: Work, current: Work) -> bool:
        return news.sequence == current.sequence and not self.stubborn

    def linger_s(self, message: Work) -> float:
        return self.patience(message)

    def _answers(self, message: Work) -> Iterator[FromService | None]:
        match message:
            case OpenSequence():
                yield from [None] * max(0, len(message.tokens) - 2)
                yield Prefilled(sequence=message.sequence, length=2, prefill_ms=0.0)
            case Prepare():
                yield from (tree(message, depth) for depth in range(1, message.depth + 1))
            case Verify():
                raise ValueError(f"no verification of {message.nodes} here")
            case _:
                return


def tree(message: Prepare, depth: int) -> DraftTree:
    return DraftTree(
        sequence=message.sequence,
        round=message.round,
        depth=depth,
        outcomes=[],
        tokens=[],
        confidences=[],
        draft_ms=0.0,
    )


class Certain(Channel[ToService]):
    """Whatever the test has sent is waited for: when it arrives decides nothing."""

    sent = 0
    _read = 0

    def ready(self, timeout_s: float) -> bool:
        return super().ready(timeout_s if self._read >= self.sent else PATIENCE_S)

    def receive(self, timeout_s: float, what: str) -> ToService:
        self._read += 1
        return super().receive(timeout_s, what)


class Running(NamedTuple):
    """A service in a thread, and the orchestrator's end of its connection."""

    hub: Hub[FromService]
    service: FakeService
    peer: bytes
    hello: Hello
    thread: threading.Thread
    raised: list[BaseException]
    channel: Certain

    def send(self, *messages: Message | bytes) -> None:
        """All of them arrive before the service's next step."""
        self.channel.sent += len(messages)
        for message in messages:
            assert self.hub.send(self.peer, message)

    def receive(self) -> FromService:
        """The next message that is not a beat."""
        peer, message = heard(self.hub, but=Heartbeat)
        assert peer == self.peer
        assert not isinstance(message, ProtocolError)
        if isinstance(message, Prefilled | VerificationOutcome | DraftTree):
            assert 0 <= time.monotonic_ns() - message.at_ns < 60e9  # when it left, on our clock
            return msgspec.structs.replace(message, at_ns=0)
        return message

    def end(self) -> BaseException | None:
        """Wait until `serve` has returned; what it raised."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.raised[0] if self.raised else None


@pytest.fixture
def connected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service that has said Hello and waits for the answer."""
    address = ipc_address(str(tmp_path_factory.mktemp("z") / "s"))
    service, raised = FakeService(), list[BaseException]()
    channels: list[Certain] = []

    def run() -> None:
        try:
            with Certain(address, Decoder(ToService)) as channel:
                channels.append(channel)
                serve(channel, IDENTITY, service)
        except BaseException as error:  # noqa: BLE001  # it is looked at in the test's thread
            raised.append(error)

    with ExitStack() as stack:
        hub: Hub[FromService] = stack.enter_context(Hub(address, Decoder(FromService)))
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert hub.ready(PATIENCE_S)
        received = hub.receive()
        assert received is not None
        peer, hello = received
        assert isinstance(hello, Hello)
        yield Running(hub, service, peer, hello, thread, raised, channels[0])
        if not hub.socket.closed:
            hub.send(peer, Stop())
        thread.join(PATIENCE_S)


@pytest.fixture
def running(connected: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A service that was welcomed; it does not beat, however long the test takes."""
    monkeypatch.setattr("services.runtime.heartbeat.BEAT_S", 1000.0)
    connected.send(Welcome())
    return connected


@contextmanager
def paused(running: Running, message: Work, number: int) -> Iterator[None]:
    """Send a message; inside, the service is about to give its answer `number` (from 0) to it."""
    arrived, gate = threading.Event(), threading.Event()

    def step(current: Work, at: int) -> None:
        if (current, at) == (message, number):
            arrived.set()
            gate.wait(PATIENCE_S)

    running.service.before_answer = step
    running.send(message)
    assert arrived.wait(PATIENCE_S)
    yield
    gate.set()


# ---------------------------------------------------------------- the handshake


def test_hello_says_who_is_there(connected: Running) -> None:
    """The first word is the identity, with the protocol's version and the process."""
    hello = connected.hello
    assert (PROTOCOL_VERSION, os.getpid()) == (hello.protocol, hello.pid)
    for name in IDENTITY.__struct_fields__:
        assert getattr(IDENTITY, name) == getattr(hello, name)


def test_a_refusal_is_a_model_error(connected: Running) -> None:
    """Who is turned away ends with the orchestrator's reason, and has handled nothing."""
    connected.send(Rejected("the tokenizers differ"))
    error = connected.end()
    assert isinstance(error, ModelError)
    assert str(error) == "the tokenizers differ"
    assert connected.service.handled == []


def test_work_before_the_welcome_is_a_protocol_error(connected: Running) -> None:
    """Anything but Welcome or Refusal is not an answer to Hello."""
    connected.send(opening(1))
    error = connected.end()
    assert isinstance(error, ProtocolError)
    assert str(error) == "expected Welcome or Rejected, got OpenSequence"
    assert connected.service.handled == []


def test_no_answer_to_hello_is_a_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An orchestrator that is not there is waited for, but not for ever."""
    monkeypatch.setattr("services.runtime.heartbeat.BEAT_S", 0.001)
    address = ipc_address(str(tmp_path_factory.mktemp("z") / "s"))
    with Channel[ToService](address, Decoder(ToService)) as channel:
        channel.socket.linger = 0
        with pytest.raises(DeadlineExceeded, match="the orchestrator has been silent"):
            serve(channel, IDENTITY, FakeService())


def test_a_hello_that_was_lost_is_said_again(connected: Running) -> None:
    """An orchestrator that dies with our Hello in its hands: its successor hears a beat, asks,
    and is told; a Welcome too many does no harm."""
    address = connected.hub.bound_to
    connected.hub.close()
    with Hub[FromService](address, Decoder(FromService)) as successor:
        peer, beat = heard(successor)
        assert beat == Heartbeat(0)
        for _ in range(2):  # as for beats that have waited for it
            successor.send(peer, Identify())
        assert heard(successor, but=Heartbeat) == (peer, connected.hello)
        for message in (Welcome(), Welcome(), opening(1)):
            successor.send(peer, message)
        _, opened = heard(successor, but=Heartbeat)
        assert isinstance(opened, Prefilled)
        successor.send(peer, Stop())
        assert connected.end() is None


def test_a_new_orchestrator_hears_of_us_at_once(running: Running) -> None:
    """A service that has nothing to do beats when its connection is a new one, not a beat later."""
    running.send(opening(1))
    # From its answer on it has nothing to do, and no beat is due.
    assert isinstance(running.receive(), Prefilled)
    address = running.hub.bound_to
    running.hub.close()
    with Hub[FromService](address, Decoder(FromService)) as successor:
        peer, beat = heard(successor)
        assert beat == Heartbeat(0)
        successor.send(peer, Stop())
        assert running.end() is None


def heard(
    hub: Hub[FromService], but: type[FromService] | None = None
) -> tuple[bytes, FromService | ProtocolError]:
    """The next message, and from whom; none of the kind `but`."""
    while True:
        assert hub.ready(PATIENCE_S)
        received = hub.receive()
        assert received is not None
        if but is None or not isinstance(received[1], but):
            return received


# ---------------------------------------------------------------- work


def test_messages_of_a_sequence_are_answered_in_order(running: Running) -> None:
    """One message in, its answers out, then the next of that sequence."""
    running.service.stubborn = True
    running.send(opening(1), prepare(5), opening(1))
    expected = [
        Prefilled(sequence=1, length=2, prefill_ms=0.0),
        *(tree(prepare(5), depth) for depth in range(1, 4)),
        Prefilled(sequence=1, length=2, prefill_ms=0.0),
    ]
    assert expected == [running.receive() for _ in expected]
    running.send(Stop())
    assert running.end() is None
    assert running.service.handled == running.service.ended


def test_answers_leave_as_they_are_ready(running: Running) -> None:
    """An answer is on its way before the next one is worked on."""
    with paused(running, prepare(1), 1):
        assert running.receive() == tree(prepare(1), 1)
        assert not running.hub.ready(0.0)
    assert [running.receive() for _ in range(2)] == [tree(prepare(1), depth) for depth in (2, 3)]


def test_one_failure_is_not_the_end(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    """A message that cannot be served is answered by Failed; the service goes on."""
    with caplog.at_level(logging.ERROR):
        running.send(Verify(sequence=7, round=1, position=0, nodes=[4]), opening(8))
        failed = running.receive()
        reason = "ValueError: no verification of [4] here"
        assert failed == Failed(sequence=7, error=reason)
        assert running.receive() == Prefilled(sequence=8, length=2, prefill_ms=0.0)
    assert "Verify of sequence 7 failed" in caplog.text


def test_a_failure_may_come_after_answers(running: Running) -> None:
    """What was answered before the failure stands; Failed comes last."""

    def fail_at_depth_two(message: Work, number: int) -> None:
        if isinstance(message, Prepare) and number == 1:
            raise MemoryError("no room for more")

    running.service.before_answer = fail_at_depth_two
    running.send(prepare(1))
    assert running.receive() == tree(prepare(1), 1)
    assert running.receive() == Failed(sequence=1, error="MemoryError: no room for more")
    running.send(opening(2))
    assert running.receive() == Prefilled(sequence=2, length=2, prefill_ms=0.0)


def test_memory_that_runs_out_ends_one_request(running: Running) -> None:
    """The sentence reaches the client as it is, and other sequences are served."""

    def refuse(message: Work, number: int) -> None:
        if message.sequence == 1:
            raise OutOfMemory("a pass over 512 tokens needs 3000 MB of memory")

    running.service.before_answer = refuse
    running.send(opening(1), opening(2))
    assert running.receive() == Failed(
        sequence=1, error="a pass over 512 tokens needs 3000 MB of memory"
    )
    assert running.receive() == Prefilled(sequence=2, length=2, prefill_ms=0.0)


def answers_until(running: Running, last: FromService) -> list[FromService]:
    answers = [running.receive()]
    while answers[-1] != last:
        answers.append(running.receive())
    return answers


ENDLESS = prepare(1, depth=10**6)


def test_superseded_work_is_abandoned(running: Running) -> None:
    """News that makes the rest pointless ends it after the step in hand; then comes the news."""
    news = prepare(2, depth=2)
    with paused(running, ENDLESS, 2):
        running.send(news)
    expected = [*(tree(ENDLESS, depth) for depth in (1, 2, 3)), tree(news, 1), tree(news, 2)]
    assert expected == [running.receive() for _ in expected]
    assert running.service.ended[0] == ENDLESS


def test_sequences_take_turns(running: Running) -> None:
    """News of another sequence supersedes nothing: it begins at once, and then they alternate."""
    others = [prepare(1, sequence=2), prepare(1, sequence=3)]
    with paused(running, prepare(1), 0):
        running.send(*others)
    expected = [
        tree(prepare(1, sequence=number), depth) for depth in (1, 2, 3) for number in (1, 2, 3)
    ]
    assert expected == [running.receive() for _ in expected]


def test_one_who_waits_for_others_goes_on_when_they_come(running: Running) -> None:
    """A service may wait for company; each piece of news, and the end of patience, ends that."""
    first, second = prepare(1), prepare(1, sequence=2)
    waits = threading.Event()

    def patience(message: Work) -> float:
        if message != first or second in running.service.handled:
            return 0.0
        waits.set()
        return PATIENCE_S

    running.service.patience = patience
    running.send(first)
    assert running.receive() == tree(first, 1)
    assert waits.wait(PATIENCE_S)
    running.send(second)
    rest = [running.receive() for _ in range(5)]
    assert rest[0] == tree(second, 1)
    assert tree(first, 3) in rest


def test_what_was_never_begun_is_not_lost(running: Running) -> None:
    """Of two rounds in line only the newer is worked for, with the tokens that both told."""
    old = Prepare(sequence=1, round=1, base=4, tokens=[7, 8], nodes=[9], fan_out=[1], depth=2)
    new = Prepare(sequence=1, round=2, base=6, tokens=[9, 3], nodes=[5], fan_out=[1], depth=1)
    with paused(running, prepare(1, sequence=2), 0):
        running.send(old, new)
    answers = answers_until(running, tree(prepare(1, sequence=2), 3))
    assert tree(new, 1) in answers
    assert [m for m in running.service.handled if m.sequence == 1] == [
        Prepare(sequence=1, round=2, base=4, tokens=[7, 8, 9, 3], nodes=[5], fan_out=[1], depth=1)
    ]


def test_work_without_answers_may_be_abandoned(running: Running) -> None:
    """A long prefill is left for news at the points that it names, and says nothing until then."""
    long = OpenSequence(sequence=1, tokens=[1] * 10**6, sampling=Sampling())
    with paused(running, long, 2):
        running.send(opening(1))
    assert running.receive() == Prefilled(sequence=1, length=2, prefill_ms=0.0)
    assert running.service.ended[0] == long
    short = OpenSequence(sequence=2, tokens=[1] * 5, sampling=Sampling())
    running.send(short)
    assert running.receive() == Prefilled(sequence=2, length=2, prefill_ms=0.0)
    assert not running.hub.ready(0.0)


def test_a_closed_sequence_is_not_worked_for(running: Running) -> None:
    """Closing ends the work on a sequence and is handled, without an answer."""
    with paused(running, ENDLESS, 3):
        running.send(CloseSequence(sequence=1), opening(9))
    answers = answers_until(running, Prefilled(sequence=9, length=2, prefill_ms=0.0))
    assert answers[:-1] == [tree(ENDLESS, depth) for depth in (1, 2, 3, 4)]
    assert running.service.ended[:2] == [ENDLESS, CloseSequence(sequence=1)]


# ---------------------------------------------------------------- the end


def test_stop_ends_an_idle_service(running: Running) -> None:
    """Stop is the end without an error."""
    running.send(opening(1))
    assert running.receive() == Prefilled(sequence=1, length=2, prefill_ms=0.0)
    running.send(Stop())
    assert running.end() is None


def test_stop_is_the_last_word(running: Running) -> None:
    """Who is replaced while it speaks is told to stop, and is then a stranger."""
    with paused(running, ENDLESS, 2):
        running.send(Stop(), Identify())
    assert running.end() is None


def test_stop_may_answer_hello(connected: Running) -> None:
    """The place is taken by a younger process."""
    connected.send(Stop())
    assert connected.end() is None
    assert connected.service.handled == []


def test_stop_interrupts_work(running: Running) -> None:
    """A long piece of work is left within one step, and its generator is closed."""
    with paused(running, ENDLESS, 2):
        running.send(Stop())
    assert running.end() is None
    assert running.service.ended == [ENDLESS]


def test_a_refusal_after_the_welcome_is_a_protocol_error(running: Running) -> None:
    """It has no meaning after the handshake."""
    running.send(Rejected("too late"))
    error = running.end()
    assert isinstance(error, ProtocolError)
    assert str(error) == "Rejected after the handshake"
    assert running.service.handled == []


def test_nonsense_while_idle_ends_the_service(running: Running) -> None:
    """Who speaks another language is not served any longer."""
    running.send(b"nonsense")
    assert isinstance(running.end(), ProtocolError)


def test_nonsense_while_working_blames_no_sequence(running: Running) -> None:
    """It ends the service as it does while idle; the sequence that is worked on has not failed."""
    with paused(running, prepare(1), 1):
        running.send(b"nonsense")
    assert isinstance(running.end(), ProtocolError)
    assert [running.receive() for _ in (1, 2)] == [tree(prepare(1), depth) for depth in (1, 2)]
    assert not running.hub.ready(0.0)


def test_a_deaf_orchestrator_ends_the_service() -> None:
    """When nothing can be sent any more, there is nobody to tell: the error leaves `serve`."""

    class Deaf:
        """A channel whose peer has stopped reading after the handshake."""

        def __init__(self) -> None:
            self.inbox: list[ToService] = [Welcome(), opening(1)]
            self.sent = 0

        def ready(self, timeout_s: float) -> bool:
            return bool(self.inbox)

        def await_news(self, timeout_s: float) -> bool:
            return self.ready(timeout_s)

        def receive(self, timeout_s: float, what: str) -> ToService:
            return self.inbox.pop(0)

        def send(self, message: Message) -> None:
            self.sent += 1
            if self.sent > 1:
                raise RuntimeFailure("the orchestrator has stopped reading its messages")

    with pytest.raises(RuntimeFailure, match="stopped reading"):
        serve(Deaf(), IDENTITY, FakeService())


def test_a_service_may_say_itself_when_its_work_ended() -> None:
    """Else it ended when the answer left."""
    done = Prefilled(sequence=1, length=2, prefill_ms=0.0)
    said = msgspec.structs.replace(done, at_ns=7)
    assert _stamp(said) == said
    before = time.monotonic_ns()
    stamped = _stamp(done)
    assert isinstance(stamped, Prefilled)
    assert before <= stamped.at_ns <= time.monotonic_ns()
