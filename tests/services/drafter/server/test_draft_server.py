"""`ssd draft-server` as a host sees it: a real process, its pipes, both protocols."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from protocol.decoding.token_tree import read_tree
from protocol.errors import BackendLost, ModelError, ProtocolError
from protocol.messages import (
    CloseSequence,
    DraftNow,
    DraftTree,
    FromDrafter,
    Heartbeat,
    Hello,
    Message,
    OpenSequence,
    Prefilled,
    Prepare,
    Rejected,
    Sampling,
    Stop,
    Tokens,
    Welcome,
)
from protocol.transport.codec import Decoder, encode
from protocol.transport.pipes import PipeChannel
from services.drafter.backends.base import Outcome, TreeLayer
from services.drafter.backends.line_client import LineBackend
from services.drafter.relay.process import DrafterProcess
from services.drafter.server.line_server import LineServer
from tests.services.drafter.lookup_backend import LookupBackend
from tests.support.reference import drafts

pytestmark = pytest.mark.processes

SERVER = [sys.executable, "-m", "tests.services.drafter.lookup_server"]
TOKENS = [7, 8, 9, 10, 11, 7, 8]
PATIENCE_S = 120.0


class Host:
    """The other end of a draft server."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stream: PipeChannel[FromDrafter] = PipeChannel(
            self.process.stdout.fileno(), self.process.stdin.fileno(), Decoder(FromDrafter)
        )

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.stream.send(message)

    def receive(self) -> FromDrafter:
        """The next message that is not a beat."""
        while isinstance(message := self.stream.receive(PATIENCE_S, "message"), Heartbeat):
            pass
        return message

    def ends(self) -> tuple[int, str]:
        """Close its input; exit code and log."""
        _, log = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, log.decode()


@pytest.fixture
def host() -> Iterator[Host]:
    one = Host()
    yield one
    one.process.kill()
    one.process.communicate()


def test_a_request_over_pipes(host: Host) -> None:
    """Hello, Prefilled, trees for Prepare and DraftNow; the end of the input is a clean exit."""
    hello = host.receive()
    assert isinstance(hello, Hello)
    assert (hello.role, hello.backend) == ("drafter", "lookup")
    host.send(Welcome(), OpenSequence(sequence=4, tokens=TOKENS, sampling=Sampling()))
    prefilled = host.receive()
    assert isinstance(prefilled, Prefilled)
    assert prefilled.length == len(TOKENS)
    common = {"sequence": 4, "base": len(TOKENS), "tokens": []}
    host.send(DraftNow(**common, round=1, pending=9, accepted=0, count=2))
    drafts = [host.receive(), host.receive()]
    assert [d.tokens for d in drafts if isinstance(d, DraftTree)] == [[10], [11]]
    host.send(Prepare(**common, round=2, nodes=[9], fan_out=[1], depth=1))
    tree = host.receive()
    assert isinstance(tree, DraftTree)
    assert (tree.round, tree.outcomes, tree.tokens) == (2, [(0, 10)], [11])
    host.send(CloseSequence(sequence=4))
    assert host.ends()[0] == 0


def test_stop_ends_the_server(host: Host) -> None:
    """Stop is a clean exit while the pipes stay open."""
    host.receive()
    host.send(Welcome(), Stop())
    assert host.process.wait(PATIENCE_S) == 0


def test_a_refusal_is_the_servers_error(host: Host) -> None:
    """The host's reason is the last line of the log, with the exit code of a model error."""
    host.receive()
    host.send(Rejected("another tokenizer"))
    code, log = host.ends()
    assert code == 3
    assert "error: another tokenizer" in log


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"hello?\n", "no message that is valid here"),
        (b"\xc1", "no msgpack"),
        (encode(Welcome())[:-2], "inside a message"),
    ],
)
def test_nonsense_ends_the_server(host: Host, data: bytes, words: str) -> None:
    """Garbage, and a message cut short, end it with a sentence and exit code 4."""
    host.receive()
    os.write(host.process.stdin.fileno() if host.process.stdin else -1, data)
    code, log = host.ends()
    assert code == 4
    assert words in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--backend", "mlx"], "--stdio"),
        (["--stdio", "--backend", "stdio"], "stdio"),
        (["--stdio", "--backend", "ngram"], "ngram"),
    ],
)
def test_what_cannot_be_served(flags: Sequence[str], words: str) -> None:
    """Flags that make no server are refused as usage."""
    command = [sys.executable, "-m", "launch.cli", "draft-server", *flags]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert words in done.stderr.decode()


def test_lines_over_pipes() -> None:
    """READY first, an answer per line, nothing after QUIT, clean exit."""
    lines = "PING\nDRAFT 7 3\nDRAFT 8 3\nDRAFT 7 3\nDRAFT 8 1\nRESET\nDRAFT 8 1\nQUIT\nPING\n"
    done = subprocess.run(
        [*SERVER, "--lines"],
        input=lines.encode(),
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    said = [line.rsplit(" ", 1)[0] for line in done.stdout.decode().splitlines()]
    nothing = "TOKENS "
    drafts = [nothing, nothing, "TOKENS 8,7", "TOKENS 7"]
    assert said == ["READY", "PONG", *drafts, "OK", nothing]
    assert done.returncode == 0


@pytest.mark.parametrize(
    "line", ["DRAFT", "DRAFT 1", "DRAFT 1 0", "DRAFT 1 65", "DRAFT -1 2", "DRAFT 1 x", "WHO", "9"]
)
def test_bad_lines_change_nothing(line: str) -> None:
    """An ERROR is an answer, and the context is what it was."""
    server = LineServer(LookupBackend())
    for token in TOKENS:
        server.answer(f"DRAFT {token} 1")
    assert server.answer(line).startswith("ERROR ")
    assert server.answer("DRAFT 9 2").startswith("TOKENS 10,11 ")


# ---------------------------------------------------------------- driving a line server

SERVER_SCRIPT = """
import sys, time
kind, context, asked = sys.argv[1], [], 0
print("READY", flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == "PING": print("PONG", flush=True)
    elif words[0] == "RESET":
        if kind != "sticky": context = []
        print("OK", flush=True)
    elif words[0] == "DRAFT":
        asked += 1
        if asked > 12:
            if kind == "crash": sys.exit("out of tokens")
            if kind == "silent": time.sleep(1000)
            if kind == "garbage": print("loading 12%", flush=True); continue
            if kind == "error": print("ERROR no", flush=True); continue
        context.append(int(words[1]))
        work = list(context)
        for _ in range(int(words[2])): work.append((sum(work) * 7 + len(work)) % 97)
        drafts = work[len(context):]
        if kind == "greedy": context = work[:-1]
        print("TOKENS", ",".join(map(str, drafts)), "1.5ms", flush=True)
"""


def after(context: Tokens, count: int) -> Tokens:
    """What the script drafts."""
    work = list(context)
    for _ in range(count):
        work.append((sum(work) * 7 + len(work)) % 97)
    return work[len(context) :]


def line_server(kind: str) -> DrafterProcess:
    return DrafterProcess([sys.executable, "-c", SERVER_SCRIPT, kind])


def opened(program: DrafterProcess, answer_s: float = PATIENCE_S) -> LineBackend:
    drafter = LineBackend(program, PATIENCE_S, answer_s)
    for _ in drafter.open(1, TOKENS, Sampling()):
        pass
    return drafter


def grown(drafter: LineBackend, chain: Tokens) -> list[TreeLayer]:
    fan_out = [1] * len(chain)
    return [
        layer for layer in drafter.prepare(1, read_tree(chain), fan_out, 2) if layer is not None
    ]


def test_a_line_server_is_driven_by_its_context() -> None:
    """Drafts follow the committed tokens; one branch is prepared where it leaves the chain."""
    with line_server("good") as program:
        drafter = opened(program)
        found = [d.token for d in drafts(drafter.draft(1, 9, 3))]
        assert found == after([*TOKENS, 9], 3)
        # The target kept one of them and went on with another token.
        drafter.commit(1, len(TOKENS), [9, found[0]])
        context = [*TOKENS, 9, found[0], 5]
        own = after(context, 5)
        assert grown(drafter, [5]) == [
            TreeLayer([Outcome(0, own[0])], [own[1]], [0.5]),
            TreeLayer([Outcome(0, own[0])], [own[2]], [0.5]),
        ]
        drafter.commit(1, len(context) - 1, [5])
        own = after([*context, 3], 5)
        assert grown(drafter, [3, own[0], 96 - own[1]]) == [
            TreeLayer([Outcome(1, own[1])], [own[2]], [0.5]),
            TreeLayer([Outcome(1, own[1])], [own[3]], [0.5]),
        ]


def test_a_new_sequence_resets_the_context() -> None:
    """The second time is as the first, and the older sequence is served no more."""
    with line_server("good") as program:
        drafter = opened(program)
        for _ in drafter.open(2, [1, 2], Sampling()):
            pass
        assert [d.token for d in drafts(drafter.draft(2, 3, 2))] == after([1, 2, 3], 2)
        with pytest.raises(ProtocolError, match="newest sequence"):
            next(drafter.draft(1, 9, 1))


@pytest.mark.parametrize(
    ("kind", "words"), [("sticky", "otherwise after RESET"), ("greedy", "keeps its drafts")]
)
def test_a_line_server_that_is_none_is_refused(kind: str, words: str) -> None:
    """A RESET that resets nothing, and drafts that stay in the context, are found at the start."""
    with line_server(kind) as program, pytest.raises(ModelError, match=words):
        LineBackend(program, PATIENCE_S, PATIENCE_S)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("crash", BackendLost, "exit code 1; its last words: out of tokens"),
        ("silent", BackendLost, r"did not answer within 0\.5 s"),
        ("garbage", BackendLost, "no answer to DRAFT"),
        ("error", ProtocolError, "ERROR no"),
    ],
)
def test_a_line_server_that_breaks_off(kind: str, error: type[Exception], words: str) -> None:
    """A crash, silence or garbage ends the drafter process; an ERROR only the sequence."""
    with line_server(kind) as program, pytest.raises(error, match=words):
        opened(program, 0.5 if kind == "silent" else PATIENCE_S)


def test_a_line_server_with_a_model_drafts_as_its_model() -> None:
    """Our own server passes the driver's checks and continues what it was sent."""
    with DrafterProcess([*SERVER, "--lines"]) as program:
        drafter = opened(program)
        assert [d.token for d in drafts(drafter.draft(1, 9, 2))] == [10, 11]
