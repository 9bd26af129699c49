"""A drafter that speaks the protocol, and then misbehaves in one way.

    python hostile_drafter.py KIND                         # on standard input and output
    python hostile_drafter.py KIND ADDRESS SEED SECONDS    # at an orchestrator's socket

It knows nothing of the project but the wire. Its good drafts are the token after the pending
one, plus one each; they are never right but by accident.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import msgpack

Map = dict[str, Any]

MANY = 200
HUGE = 15 * 1024 * 1024
"""Just below the largest message."""
OVERSIZED = 80 * 1024 * 1024
VOCABULARY = 280
"""Of the tiny models that the tests use."""


class Wire(Protocol):
    """The way to the host."""

    stream: bool
    """Whether bytes flow without borders, as through a pipe."""

    def write(self, data: bytes) -> None:
        """Send bytes, which may be no message."""

    def messages(self) -> Iterator[Map]:
        """What the host says, to its end."""


class Pipes:
    """Standard input and output."""

    stream = True

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(1, data) :]

    def messages(self) -> Iterator[Map]:
        unpacker = msgpack.Unpacker()
        while data := os.read(0, 65536):
            unpacker.feed(data)
            yield from unpacker


class Socket:
    """An orchestrator's socket, for a while."""

    stream = False

    def __init__(self, address: str, seconds: float, *, beats: bool) -> None:
        import zmq  # noqa: PLC0415  # pipes do without it

        self._end = time.monotonic() + seconds
        self._beats = beats
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 200
        self._socket.sndtimeo = 1000
        self._socket.connect(address)
        self._gone = zmq.Again

    def write(self, data: bytes) -> None:
        try:
            self._socket.send(data)
        except self._gone:
            sys.exit(1)  # nobody reads what we send any more

    def messages(self) -> Iterator[Map]:
        while (left := self._end - time.monotonic()) > 0.0:
            if self._beats:
                self.write(msgpack.packb({"type": "heartbeat", "sequence": 0}))
            if not self._socket.poll(1e3 * min(0.25, left)):
                continue
            message = msgpack.unpackb(self._socket.recv())
            if message["type"] in ("stop", "rejected"):
                return
            yield message


class Hostile:
    """One drafter, its kind and its dice."""

    def __init__(self, kind: str, wire: Wire, seed: int) -> None:
        self.kind = kind
        self.wire = wire
        self.dice = random.Random(seed)  # noqa: S311  # no secret
        self.late: dict[int, Map] = {}

    def send(self, *messages: Map) -> None:
        for message in messages:
            self.wire.write(msgpack.packb(message))

    def run(self) -> None:
        match self.kind:
            case "noisy":
                threading.Thread(target=shout, daemon=True).start()
            case "wordless":
                time.sleep(1000)
            case "dies":
                sys.exit("no weights here")
        self.send(self.hello())
        for message in self.wire.messages():
            if self.kind in ("unready", "unresponsive"):
                continue
            match message["type"]:
                case "open":
                    length, sequence = len(message["tokens"]), message["sequence"]
                    prefilled = {"type": "prefilled", "sequence": sequence, "length": length}
                    self.send(prefilled | {"prefill_ms": 0.1})
                case "prepare" | "draft":
                    KINDS[self.kind](self, trees(message))

    def hello(self) -> Map:
        return {
            "type": "hello",
            "protocol": 4,
            "role": "verifier" if self.kind == "role" else "drafter",
            "pid": os.getpid(),
            "backend": "hostile",
            "model": "x" * HUGE if self.kind == "huge hello" else "",
            "tokenizer_fingerprint": "beef" if self.kind == "tokenizer" else "",
            "vocabulary_size": 0,
            "context_length": 0,
            "compute_unit": "unknown",
            "max_draft_tokens": 8,
            "takes_trees": self.kind == "forked",
        }


def trees(message: Map) -> list[Map]:
    """A good answer to Prepare or DraftNow: one branch, depth by depth."""
    now = message["type"] == "draft"
    first = message["pending"] if now else message["nodes"][-1]
    outcome = [message["accepted"], first] if now else [len(message["nodes"]) - 1, first + 1]
    count = message["count"] if now else message["depth"]
    return [
        {
            "type": "tree",
            "sequence": message["sequence"],
            "round": message["round"],
            "depth": depth,
            "outcomes": [outcome] if depth == 1 else [],
            "tokens": [first % 200 + depth],
            "confidences": [0.9],
            "draft_ms": 0.1,
            "last": depth == count,
        }
        for depth in range(1, count + 1)
    ]


# ---------------------------------------------------------------- kinds


def good(me: Hostile, trees: list[Map]) -> None:
    me.send(*trees)


def slow(me: Hostile, trees: list[Map]) -> None:
    time.sleep(0.05)
    me.send(*trees)


def late(me: Hostile, trees: list[Map]) -> None:
    """Answers the question before, whenever the next one comes."""
    before = me.late.pop(trees[0]["sequence"], None)
    me.late[trees[0]["sequence"]] = trees[0]
    if before is not None:
        me.send(before)


def wrong(me: Hostile, trees: list[Map]) -> None:
    """Well-formed, sure of itself, and never right."""
    tree = trees[0]
    if tree["outcomes"][0][0]:  # of a Prepare: any outcomes
        outcomes = [[me.dice.randrange(9), me.dice.randrange(VOCABULARY)] for _ in range(4)]
        tokens = [me.dice.randrange(VOCABULARY) for _ in outcomes]
        tree |= {"outcomes": outcomes, "tokens": tokens, "confidences": [0.99] * 4}
    me.send(tree | {"last": me.dice.random() < 0.5})


def stale(me: Hostile, trees: list[Map]) -> None:
    for tree in trees:
        old = [{"round": max(0, tree["round"] - back)} for back in (1, 2, 7)]
        me.send(*(tree | change for change in old))
        me.send(tree | {"sequence": tree["sequence"] + 1}, tree)


def duplicate(me: Hostile, trees: list[Map]) -> None:
    me.send(*[trees[0]] * MANY)


def flood(me: Hostile, trees: list[Map]) -> None:
    me.send(*[trees[0] | {"round": 0}] * (20 * MANY))


def absurd(me: Hostile, trees: list[Map]) -> None:
    """Values that make no sense, in fields of the right kind."""
    for tree in trees:
        sequence, number = tree["sequence"], tree["round"]
        wild = [[-5, 1], [99, 2**31 - 1], [0, 1], [0, 1]]
        me.send(
            tree | {"depth": -1},
            tree | {"depth": 2**40},
            tree | {"outcomes": wild, "tokens": [2**31 - 1] * 4, "confidences": [1.0] * 4},
            tree | {"tokens": [1, 2, 3], "draft_ms": float("nan")},
            tree | {"tokens": []},
            tree | {"distributions": [{"tokens": [1], "probabilities": [0.1]}], "draft_ms": -1e300},
            {"type": "prefilled", "sequence": sequence, "length": -3, "prefill_ms": 0.0},
            tree | {"round": number + 1},
            tree | {"round": number + 5, "sequence": 2**60},
            tree,
        )


def fork(me: Hostile, trees: list[Map]) -> None:
    """Trees that are none: parents that are not there, siblings alike, too many nodes."""
    first = trees[0]
    for parents in ([7], [0, 0], [0] * 4000, [1, 0], [], [4000] * 9):
        for tokens in ([5] * len(parents), list(range(len(parents))), [3]):
            shape = {"parents": parents, "tokens": tokens, "confidences": [0.9] * len(tokens)}
            me.send(first | shape)
    deeper = {"depth": 2, "outcomes": [], "parents": [9, 9, 0], "tokens": [1, 1, 1]}
    me.send(first | deeper | {"confidences": [0.9] * 3}, *trees)


def huge(me: Hostile, trees: list[Map]) -> None:
    """A message as large as any may be."""
    size = 4000
    every = [{"tokens": list(range(size)), "probabilities": [1 / size] * size}]
    me.send(trees[0] | {"distributions": every * 150, "tokens": [1] * 150})


def impersonate(me: Hostile, trees: list[Map]) -> None:
    """Speaks as if it were the verifier."""
    outcome = {key: trees[0][key] for key in ("sequence", "round")}
    bonus = me.dice.randrange(VOCABULARY)
    me.send(
        outcome
        | {"type": "outcome", "accepted": 0, "bonus": bonus, "verify_ms": 1.0, "idle_ms": 1.0}
    )


def fail(me: Hostile, trees: list[Map]) -> None:
    me.send({"type": "failed", "sequence": trees[0]["sequence"], "error": "it does not want to"})


def send_nan(me: Hostile, trees: list[Map]) -> None:
    me.send(trees[0] | {"confidences": [float("nan")]})


def truncate(me: Hostile, trees: list[Map]) -> None:
    frame = msgpack.packb(trees[0])
    me.wire.write(frame[: len(frame) // 2])
    if me.wire.stream:
        os._exit(0)


def oversize(me: Hostile, trees: list[Map]) -> None:
    del trees
    if not me.wire.stream:
        me.wire.write(b"\xc1" * OVERSIZED)
        return
    me.wire.write(b"\xc6\xff\xff\xff\xff")
    while True:
        me.wire.write(bytes(1 << 20))


def garble(me: Hostile, trees: list[Map]) -> None:
    del trees
    me.wire.write(b"loading weights 12%\n\x00\xc1\xff" * 9 + me.dice.randbytes(900))


def nest(me: Hostile, trees: list[Map]) -> None:
    del trees
    me.wire.write(b"\x91" * 100_000)


def invent_field(me: Hostile, trees: list[Map]) -> None:
    me.send(trees[0] | {"colour": "red"})


def hang(me: Hostile, trees: list[Map]) -> NoReturn:
    del me, trees
    while True:
        time.sleep(1000)


def close_output(me: Hostile, trees: list[Map]) -> NoReturn:
    os.close(1)
    hang(me, trees)


def close_input(me: Hostile, trees: list[Map]) -> NoReturn:
    os.close(0)
    hang(me, trees)


def crash(me: Hostile, trees: list[Map]) -> None:
    me.send(trees[0])
    os.kill(os.getpid(), 11)


def shout() -> None:
    """Standard error without end."""
    while True:
        os.write(2, b"error: the sky is falling\n" * 100)


KINDS: dict[str, Callable[[Hostile, list[Map]], None]] = {
    "absurd": absurd,
    "crash": crash,
    "deaf": close_input,
    "duplicated": duplicate,
    "eof": close_output,
    "failing": fail,
    "flood": flood,
    "forked": fork,
    "garbage": garble,
    "hang": hang,
    "huge": huge,
    "impostor": impersonate,
    "late": late,
    "nested": nest,
    "not-a-number": send_nan,
    "oversized": oversize,
    "slow": slow,
    "stale": stale,
    "truncated": truncate,
    "unknown": invent_field,
    "wrong": wrong,
} | dict.fromkeys(
    # These misbehave before they are asked for anything, or not at all.
    ("good", "huge hello", "noisy", "role", "tokenizer", "unready", "unresponsive", "wordless"),
    good,
)
BY_SOCKET = (
    "absurd",
    "duplicated",
    "failing",
    "flood",
    "forked",
    "garbage",
    "huge",
    "huge hello",
    "impostor",
    "late",
    "nested",
    "not-a-number",
    "oversized",
    "stale",
    "truncated",
    "unresponsive",
    "wrong",
)
"""Kinds that make sense for one who comes to the orchestrator's socket, and goes again."""


def main() -> None:
    kind, *others = sys.argv[1:]
    if not others:
        Hostile(kind, Pipes(), 0).run()
        return
    address, seed, seconds = others
    wire = Socket(address, float(seconds), beats=kind != "unresponsive")
    Hostile(kind, wire, int(seed)).run()


if __name__ == "__main__":
    main()
