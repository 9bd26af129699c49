"""A drafter that does harm: says Hello like an honest one, then misbehaves in one way.

Run as a process of its own (`python -m tests.chaos.hostile SETTINGS`); it ends by itself.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator

import msgspec

from protocol.errors import SsdError
from protocol.messages import (
    PROTOCOL_VERSION,
    DraftNow,
    DraftTree,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Prepare,
    Stop,
    ToDrafter,
    ToService,
    VerificationOutcome,
)
from protocol.transport.channel import Channel, Deadline
from protocol.transport.codec import Decoder, encode

_MANY = 200


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What it is told."""

    address: str
    behaviour: str
    seed: int
    seconds: float


Asked = Prepare | DraftNow


def _tree(asked: Asked, dice: random.Random, **changes: object) -> DraftTree:
    """A tree that is wrong in content, but well-formed, unless `changes` make it otherwise."""
    chain = asked.chain if isinstance(asked, Prepare) else [asked.pending]
    outcomes = [(dice.randrange(len(chain) + 1), dice.randrange(280)) for _ in range(4)]
    if isinstance(asked, DraftNow):
        outcomes = [(asked.accepted, asked.pending)]
    tree = DraftTree(
        sequence=asked.sequence,
        round=asked.round,
        depth=1,
        outcomes=outcomes,
        tokens=[dice.randrange(280) for _ in outcomes],
        confidences=[0.99 for _ in outcomes],
        draft_ms=1.0,
        last=dice.random() < 0.5,
    )
    return msgspec.structs.replace(tree, **changes)


def _wrong(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    yield encode(_tree(asked, dice))


def _stale(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    for back in (1, 2, 7):
        yield encode(_tree(asked, dice, round=max(0, asked.round - back)))
    yield encode(_tree(asked, dice, round=asked.round + 5, sequence=asked.sequence + 3))


def _duplicated(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    tree = encode(_tree(asked, dice))
    yield from [tree] * _MANY


def _truncated(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    tree = encode(_tree(asked, dice))
    yield tree[: dice.randrange(len(tree))]


def _oversized(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    del asked, dice
    yield b"\xc1" * (80 * 1024 * 1024)


def _garbage(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    del asked
    yield dice.randbytes(dice.randrange(1, 4000))


def _not_a_number(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    nan = [float("nan")] * (1 if isinstance(asked, DraftNow) else 4)
    yield encode(_tree(asked, dice, confidences=nan))


def _impossible(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    tree = _tree(asked, dice)
    yield encode(_tree(asked, dice, tokens=[2**31 - 1 for _ in tree.tokens]))
    yield encode(_tree(asked, dice, tokens=[], depth=dice.randrange(-3, 90)))
    yield encode(_tree(asked, dice, outcomes=[(-5, 3), (10**6, 2)], tokens=[1, 2]))


def _impostor(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    """Speaks as if it were the verifier."""
    yield encode(
        VerificationOutcome(
            sequence=asked.sequence,
            round=asked.round,
            accepted=0,
            bonus=dice.randrange(280),
            verify_ms=1.0,
            idle_ms=1.0,
        )
    )


def _flood(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    for _ in range(20 * _MANY):
        yield encode(_tree(asked, dice, round=0))


def _failing(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    del dice
    yield encode(Failed(sequence=asked.sequence, error="it does not want to"))


def _silent(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    del asked, dice
    yield from ()


def _late(asked: Asked, dice: random.Random) -> Iterator[bytes]:
    """Answers the question before, whenever the next one comes."""
    late = _late_answers.pop(asked.sequence, None)
    _late_answers[asked.sequence] = encode(_tree(asked, dice))
    if late is not None:
        yield late


_late_answers: dict[int, bytes] = {}

BEHAVIOURS: dict[str, Callable[[Asked, random.Random], Iterator[bytes]]] = {
    "late": _late,
    "wrong": _wrong,
    "stale": _stale,
    "duplicated": _duplicated,
    "truncated": _truncated,
    "oversized": _oversized,
    "garbage": _garbage,
    "not-a-number": _not_a_number,
    "impossible": _impossible,
    "impostor": _impostor,
    "flood": _flood,
    "failing": _failing,
    "silent": _silent,
}


def _hello() -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        role="drafter",
        pid=os.getpid(),
        backend="hostile",
        model="",
        tokenizer_fingerprint="",
        vocabulary_size=0,
        context_length=0,
        compute_unit="cpu",
        max_draft_tokens=8,
    )


def run(orders: Orders) -> None:
    """Misbehave until the time is over or the orchestrator says stop."""
    dice = random.Random(orders.seed)  # noqa: S311  # no secret
    channel: Channel[ToService] = Channel(orders.address, Decoder(ToDrafter))
    deadline = Deadline(orders.seconds)
    with channel:
        channel.send(_hello())
        while not deadline.passed:
            if orders.behaviour != "silent":
                channel.send(Heartbeat(0))
            if not channel.ready(min(0.25, deadline.remaining)):
                continue
            message: Message = channel.receive(0.0, "message")
            if isinstance(message, Stop):
                return
            if isinstance(message, Prepare | DraftNow):
                for data in BEHAVIOURS[orders.behaviour](message, dice):
                    channel.send_bytes(data)


def main() -> int:
    """Entry point of the process."""
    try:
        run(msgspec.json.decode(sys.argv[1], type=Orders))
    except SsdError:
        return 1  # it was turned away, or nobody listens any more: either is welcome
    return 0


if __name__ == "__main__":
    sys.exit(main())
