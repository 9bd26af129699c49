"""`python hostile_drafter.py KIND`: a drafter that speaks the protocol, and then misbehaves.

It knows nothing of the project but the wire: msgpack alone. Its drafts are the token after
the pending one, plus one each; they are never right but by accident.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgpack

KIND = sys.argv[1]
HELLO = {
    "type": "hello",
    "protocol": 2,
    "role": "verifier" if KIND == "role" else "drafter",
    "pid": 1,
    "backend": "hostile",
    "model": "",
    "tokenizer_fingerprint": "beef" if KIND == "tokenizer" else "",
    "vocabulary_size": 0,
    "context_length": 0,
    "compute_unit": "cpu",
    "max_draft_tokens": 64,
}


def write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def send(message: dict[str, Any]) -> None:
    write(msgpack.packb(message))


def trees(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A good answer to Prepare or DraftNow: one branch, depth by depth."""
    now = message["type"] == "draft"
    first = message["pending"] if now else message["chain"][-1]
    outcome = [message["accepted"], first] if now else [len(message["chain"]) - 1, first + 1]
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


def absurd(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages that are valid and make no sense."""
    sequence, number = tree["sequence"], tree["round"]
    wild = [[-5, 1], [99, 2**31 - 1], [0, 1], [0, 1]]
    return [
        tree | {"depth": -1},
        tree | {"depth": 2**40},
        tree | {"outcomes": wild, "tokens": [2**31 - 1] * 4, "confidences": [1.0] * 4},
        tree | {"tokens": [1, 2, 3], "draft_ms": float("nan")},
        tree | {"distributions": [{"tokens": [1], "probabilities": [0.1]}], "draft_ms": -1e300},
        {"type": "prefilled", "sequence": sequence, "length": -3, "prefill_ms": 0.0},
        tree | {"round": number + 1},
        tree | {"sequence": 2**60},
        tree,
    ]


def misbehave(message: dict[str, Any]) -> None:
    """Answer a Prepare or DraftNow in the way of this kind."""
    good = trees(message)
    end = ENDS.get(KIND)
    if end is not None:
        end(good[0])
        return
    if KIND == "late":
        time.sleep(0.05)
    for tree in good:
        for variant in VARIANTS.get(KIND, lambda tree: [tree])(tree):
            send(variant)


def truncated(tree: dict[str, Any]) -> None:
    frame = msgpack.packb(tree)
    write(frame[: len(frame) // 2])
    os._exit(0)


def oversized(tree: dict[str, Any]) -> None:
    write(b"\xc6\xff\xff\xff\xff")
    while True:
        write(bytes(1 << 20))


def closed(descriptor: int) -> None:
    os.close(descriptor)
    time.sleep(1000)


def crash(tree: dict[str, Any]) -> None:
    send(tree)
    os.kill(os.getpid(), 11)


ENDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "garbage": lambda _: write(b"loading weights 12%\n\x00\xc1\xff" * 9),
    "truncated": truncated,
    "oversized": oversized,
    "nested": lambda _: write(b"\x91" * 100_000),
    "unknown": lambda tree: send(tree | {"colour": "red"}),
    "hang": lambda _: time.sleep(1000),
    "eof": lambda _: closed(1),
    "deaf": lambda _: closed(0),
    "crash": crash,
}
VARIANTS: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "absurd": absurd,
    "stale": lambda tree: [
        tree | {"round": tree["round"] - 1},
        tree | {"sequence": tree["sequence"] + 1},
        tree,
    ],
}


def shout() -> None:
    """Standard error without end."""
    while True:
        os.write(2, b"error: the sky is falling\n" * 100)


def main() -> None:
    if KIND == "noisy":
        threading.Thread(target=shout, daemon=True).start()
    if KIND == "silent":
        time.sleep(1000)
    if KIND == "dies":
        sys.exit("no weights here")
    send(HELLO)
    unpacker = msgpack.Unpacker()
    while data := os.read(0, 65536):
        unpacker.feed(data)
        for message in unpacker:
            match message["type"]:
                case "open" if KIND != "unready":
                    length = len(message["tokens"])
                    sequence = message["sequence"]
                    send(
                        {
                            "type": "prefilled",
                            "sequence": sequence,
                            "length": length,
                            "prefill_ms": 0.1,
                        }
                    )
                case "prepare" | "draft" if KIND != "unready":
                    misbehave(message)


if __name__ == "__main__":
    main()
