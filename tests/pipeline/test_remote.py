"""Drafters on other machines: real processes over TCP, CURVE keys, and those without one."""

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq

from launch import keyring
from launch.settings.settings import StackSettings
from protocol.errors import StreamEnded, UsageError
from protocol.messages import (
    FromDraftServer,
    Heartbeat,
    Hello,
    Identify,
    OpenSequence,
    Prefilled,
    Rejected,
    Sampling,
    Stop,
    ToDrafter,
    Welcome,
)
from protocol.transport.address import find_tcp_error
from protocol.transport.channel import Channel, Hub
from protocol.transport.codec import Decoder, encode
from protocol.transport.curve import ClientLock, KeyPair, new_keys, read_keys
from tests.support.stack import RunningStack, eventually, running
from tests.support.tiny_models import vocabulary_size, write_tiny_model
from tests.support.write_heads import eagle3, write_head

pytestmark = pytest.mark.processes

PATIENCE_S = 120.0
PROMPT = "the quick brown fox"


class Server:
    """`ssd draft-server --listen` as a real process."""

    def __init__(self, model: str, trusted: str, *more: str, backend: str = "mlx") -> None:
        self._flags = ["--trust", trusted, "--backend", backend, "--model", model, *more]
        self._listen("tcp://127.0.0.1:0")

    def _listen(self, address: str) -> None:
        command = [sys.executable, "-m", "launch.cli", "draft-server", "--listen", address]
        self.process = subprocess.Popen([*command, *self._flags], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"listening at (\S+) with the key (\S{40})", line):
                self.address, self.key = found[1], found[2]
                return
        raise AssertionError("it ended without listening")

    def again(self) -> None:
        """Another process at the same address."""
        self.end()
        self._listen(self.address)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Keys(NamedTuple):
    """A folder of keys, its own pair, and a pair that nobody trusts."""

    own: KeyPair
    stranger: KeyPair


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSD_KEYS_DIR", str(tmp_path_factory.mktemp("home") / "keys"))
        keyring.make_keys("default")
        keyring.make_keys("stranger")
        yield Keys(*(read_keys(keyring.own_keys(name)) for name in ("default", "stranger")))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("models")
    target = write_tiny_model(base / "target", "llama", seed=1)
    return str(target), str(write_tiny_model(base / "draft", "llama", seed=1, noise=0.02))


@pytest.fixture(scope="module")
def server(keys: Keys, models: tuple[str, str]) -> Iterator[Server]:
    one = Server(models[1], keys.own.public)
    assert one.key == keys.own.public  # both ends are this machine here
    yield one
    one.end()


@contextlib.contextmanager
def stack_with(models: tuple[str, str], address: str, key: str, own: str) -> Iterator[RunningStack]:
    settings = StackSettings(
        model=models[0], draft_server=address, draft_server_key=key, key=own, restarts=1000
    )
    with running(settings) as stack:
        yield stack


def drafter_lines(stack: RunningStack) -> str:
    return " ".join(f"{line.state} {line.note}" for line in stack.lines if line.role == "drafter")


def drafts(stack: RunningStack) -> bool:
    return any(s.backend == "remote" for s in stack.client.status().services)


def accepted(stack: RunningStack) -> int:
    """Drafted tokens that one more answer takes."""
    return stack.answer(PROMPT, max_tokens=48, num_draft_tokens=3).statistics.accepted


def test_drafts_from_elsewhere_change_no_token(server: Server, models: tuple[str, str]) -> None:
    """Same tokens as plain decoding, many of them drafted; the server's death costs speed only,
    and the next server is found by itself."""
    with stack_with(models, server.address, server.key, "default") as stack:
        eventually(lambda: drafts(stack), "the draft server joins")
        # Its first work may come too late for an answer.
        eventually(lambda: accepted(stack) > 5, "its drafts are used")
        for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
            plain = stack.answer(PROMPT, mode="ar", sampling=sampling, max_tokens=48)
            answer = stack.answer(PROMPT, sampling=sampling, max_tokens=48, num_draft_tokens=3)
            assert plain.tokens == answer.tokens

        def kill(count: int) -> None:
            if count > 8 and server.process.poll() is None:
                server.process.kill()
                server.process.wait()

        answer = stack.answer(
            PROMPT, sampling=sampling, max_tokens=96, num_draft_tokens=3, when=kill
        )
        assert answer.tokens[:48] == plain.tokens
        assert len(answer.tokens) == 96
        eventually(lambda: "the connection is lost" in drafter_lines(stack), "it is told why")
        server.again()
        eventually(lambda: drafts(stack), "the next server joins")
        eventually(lambda: accepted(stack) > 5, "its drafts are used")
        answer = stack.answer(PROMPT, sampling=sampling, max_tokens=48, num_draft_tokens=3)
        assert answer.tokens == plain.tokens


def test_a_head_elsewhere_reads_the_target(
    keys: Keys, models: tuple[str, str], tmp_path: Path
) -> None:
    """The target's states go to it over the network; the tokens are those of plain decoding."""
    head = write_head(tmp_path / "head", *eagle3(vocabulary_size(), layers=[1, 2, 3]))
    server = Server(str(head), keys.own.public, "--target", models[0], backend="head")
    try:
        with stack_with(models, server.address, server.key, "default") as stack:
            for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
                plain = stack.answer(PROMPT, mode="ar", sampling=sampling, max_tokens=32)
                answer = stack.until(
                    lambda a: a.statistics.drafted > 0 and a.statistics.state_bytes > 0,
                    "the head drafts, and has read",
                    partial(
                        stack.answer,
                        PROMPT,
                        sampling=sampling,
                        max_tokens=32,
                        num_draft_tokens=3,
                    ),
                )
                assert answer.tokens == plain.tokens
    finally:
        server.end()


def test_wrong_keys_cost_speed_only(server: Server, keys: Keys, models: tuple[str, str]) -> None:
    """Whom the server does not trust is told so; its requests are answered plainly."""
    with stack_with(models, server.address, server.key, "stranger") as stack:
        assert len(stack.answer(PROMPT, max_tokens=24).tokens) == 24
        eventually(lambda: "does not trust our key" in drafter_lines(stack), "it is told why")
        assert not drafts(stack)


def test_a_server_that_is_not_there_is_named(keys: Keys, models: tuple[str, str]) -> None:
    """Before anything else is said of the drafter; requests are answered plainly."""
    with socket.socket() as nobody:  # bound, but it does not listen
        nobody.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        with stack_with(models, address, keys.own.public, "default") as stack:
            notes = [line.note for line in stack.lines if line.role == "drafter" and line.note]
            assert notes[0] == f"nothing can be reached at {address}: Connection refused"
            assert len(stack.answer(PROMPT, max_tokens=8).tokens) == 8


def test_a_host_without_an_address_is_named() -> None:
    """What the system says of a name, a port, or a machine that does not answer."""
    for address, words in (
        ("tcp://nowhere.invalid:7", "nothing can be reached at tcp://nowhere.invalid:7"),
        ("tcp://127.0.0.1:seven", "seven"),
    ):
        assert words in find_tcp_error(address, 5.0)


class Visitor:
    """A host that says what it likes."""

    def __init__(self, server: Server, own: KeyPair, expected: str = "") -> None:
        lock = ClientLock(own, expected or server.key)
        self.channel: Channel[FromDraftServer] = Channel(
            server.address, Decoder(FromDraftServer), lock
        )

    def hears(self) -> object:
        """The next message that is not a beat."""
        while isinstance(
            message := self.channel.receive(PATIENCE_S, "word of the server"), Heartbeat
        ):
            pass
        return message

    def is_told(self) -> str:
        """Why there is no connection."""
        reasons: list[str] = []

        def down() -> bool:
            try:
                self.channel.check()
            except StreamEnded as error:
                reasons.append(str(error))
            return bool(reasons)

        eventually(down, "the connection is down")
        assert not self.channel.ready(0.0)
        return reasons[0]


def test_a_stranger_gets_nothing(server: Server, keys: Keys) -> None:
    """No Hello for a key that is not trusted, nor for us from a server with another key."""
    for own, expected, words in (
        (keys.stranger, "", "does not trust our key"),
        (keys.own, keys.stranger.public, "not the one that we know"),
    ):
        visitor = Visitor(server, own, expected)
        with visitor.channel:
            visitor.channel.send(Identify())
            assert words in visitor.is_told()


def test_nothing_is_said_in_clear(server: Server) -> None:
    """A zmq client without keys, and a plain TCP client, get not one message."""
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(server.address)
    plain.send(encode(Identify()))
    assert not plain.poll(500)
    context.destroy()
    host, port = server.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        raw.sendall(encode(Identify()) * 20)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while data := raw.recv(4096):
                heard += data
    assert b"hello" not in heard
    assert len(heard) <= 64  # zmq's own greeting


def test_one_host_at_a_time(server: Server, keys: Keys) -> None:
    """A second host is told to come again; when the first one vanishes, the next is served."""
    first, second = Visitor(server, keys.own), Visitor(server, keys.own)
    first.channel.send(Identify())
    assert isinstance(first.hears(), Hello)
    first.channel.send(Welcome())
    first.channel.send(OpenSequence(sequence=1, tokens=[3, 4, 5], sampling=Sampling()))
    assert isinstance(first.hears(), Prefilled)
    second.channel.send(Identify())
    refusal = second.hears()
    assert isinstance(refusal, Rejected)
    assert "serving another host" in refusal.reason
    first.channel.close()

    def served() -> bool:
        second.channel.send(Identify())
        return isinstance(second.hears(), Hello)

    eventually(served, "the next host is served")
    second.channel.send(Rejected("another tokenizer"))
    assert isinstance(second.hears(), Rejected)
    second.channel.close()


@pytest.mark.parametrize("data", [b"\xc1", b"", encode(Stop())], ids=["garbage", "empty", "stop"])
def test_no_host_ends_the_server(server: Server, keys: Keys, data: bytes) -> None:
    """Nonsense, and Stop, end the visit; the server goes on with the next host."""
    visitor = Visitor(server, keys.own)
    with visitor.channel:
        visitor.channel.send(Identify())
        assert isinstance(visitor.hears(), Hello)
        visitor.channel.send_bytes(data)
        assert isinstance(visitor.hears(), Rejected)
    assert server.process.poll() is None


def test_an_address_of_a_network_needs_keys() -> None:
    """There is no way to bind or connect TCP in clear."""
    with pytest.raises(UsageError, match="needs keys"):
        Channel("tcp://127.0.0.1:9", Decoder(FromDraftServer))
    with pytest.raises(UsageError, match="needs keys"):
        Hub("tcp://127.0.0.1:0", Decoder(ToDrafter))


def test_settings_without_keys_are_refused(keys: Keys) -> None:
    """A draft server without its key, or with a wrong address, is a UsageError."""
    for address, key, words in (
        ("tcp://127.0.0.1:7", "", "nothing is sent unencrypted"),
        ("", keys.own.public, "needs --draft-server"),
        ("http://127.0.0.1:7", keys.own.public, "write tcp://HOST:PORT"),
        ("tcp://127.0.0.1:7", "nobody", "no trusted key named"),
        ("tcp://127.0.0.1:7", "x" * 41, "is no public key"),
    ):
        with pytest.raises(UsageError, match=words):
            keyring.remote_server_of(address, key, "default")
    with pytest.raises(UsageError, match="ssd keys new elsewhere"):
        keyring.remote_server_of("tcp://127.0.0.1:7", keys.own.public, "elsewhere")


def test_a_ring_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are made once, pinned under a name, listed without secrets, and private."""
    folder = tmp_path / "keys"
    monkeypatch.setenv("SSD_KEYS_DIR", str(folder))
    public = keyring.make_keys("default")
    assert keyring.list_own_keys() == {"default": public}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert keyring.own_keys("default").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="already"):
        keyring.make_keys("default")
    other = new_keys().public
    keyring.trust("studio", other)
    assert keyring.list_trusted_keys() == {"studio": other}
    assert keyring.public_key("studio") == other == keyring.public_key(other)
    with pytest.raises(UsageError, match="trusted with another key"):
        keyring.trust("studio", public)
    keyring.forget("studio")
    with pytest.raises(UsageError, match="no trusted key"):
        keyring.public_key("studio")
    for name in ("../evil", "", ".hidden", "a/b"):
        with pytest.raises(UsageError, match="key name"):
            keyring.make_keys(name)
    victim = tmp_path / "victim"
    (folder / "trusted" / "linked").symlink_to(victim)
    keyring.trust("linked", other)  # the link is replaced, and nothing is written through it
    assert not victim.exists()
    keyring.own_keys("default").chmod(0o644)
    with pytest.raises(UsageError, match="others may read"):
        keyring.own_keys("default")
    folder.chmod(0o755)
    with pytest.raises(UsageError, match="chmod 700"):
        keyring.list_own_keys()
