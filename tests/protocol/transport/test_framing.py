"""Frames in a stream of bytes: wherever it is cut, whatever it holds."""

from itertools import pairwise

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.messages import DraftTree, Prepare
from protocol.transport.codec import encode
from protocol.transport.framing import FrameReader
from services.drafter.server.line_protocol import MAX_LINE_BYTES, Lines, read_tokens, tokens_line

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=30,
)


def frames(chunks: list[bytes], limit: int = 1 << 20) -> list[bytes]:
    """All that can be cut while the chunks arrive."""
    cutter, frames = FrameReader(limit), list[bytes]()
    for chunk in chunks:
        cutter.feed(chunk)
        while (frame := cutter.cut()) is not None:
            frames.append(frame)
    return frames


@given(st.lists(values, max_size=8), st.lists(st.integers(0, 400), max_size=8))
def test_a_stream_may_be_cut_anywhere(messages: list[object], cuts: list[int]) -> None:
    """The values come out as they went in, however many bytes arrive at a time."""
    packed = [msgpack.packb(message) for message in messages]
    stream = b"".join(packed)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[a:b] for a, b in pairwise(places)]
    assert packed == frames(chunks)


@given(st.binary(max_size=400))
def test_any_bytes_are_frames_or_an_error(data: bytes) -> None:
    """Whatever arrives, it is cut without loss, waited for, or refused with a ProtocolError."""
    cutter, received = FrameReader(), b""
    cutter.feed(data)
    try:
        while (frame := cutter.cut()) is not None:
            received += frame
    except ProtocolError:
        return
    assert data.startswith(received)
    assert cutter.inside is (received != data)


def test_one_byte_at_a_time() -> None:
    """A message that trickles in is whole in the end, and not before."""
    message = encode(
        Prepare(sequence=1, round=2, base=3, tokens=[70000], nodes=[5], fan_out=[6], depth=7)
    )
    cutter = FrameReader()
    for byte in message[:-1]:
        cutter.feed(bytes([byte]))
        assert cutter.cut() is None
        assert cutter.inside
    cutter.feed(message[-1:])
    assert message == cutter.cut()
    assert not cutter.inside


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([b"\xc1"], "no msgpack"),
        ([b"\x91" * 5000], "no msgpack"),
        ([b"\xdb\xff\xff\xff\xff", *[bytes(60_000)] * 2], "exceeds"),
        ([b"\xc6\x7f\xff\xff\xff", *[bytes(60_000)] * 2], "exceeds"),
        ([b"\xdd\xff\xff\xff\xff", bytes(60_000), bytes(60_000)], "exceeds"),
        ([bytes(200_000)], "exceeds"),
    ],
    ids=["reserved byte", "nesting", "long text", "long bytes", "endless array", "one read"],
)
def test_what_no_message_can_be(chunks: list[bytes], words: str) -> None:
    """Bytes, depths and sizes that no message has are refused; what is announced costs nothing."""
    with pytest.raises(ProtocolError, match=words):
        frames(chunks, limit=100_000)


def test_a_large_message_passes() -> None:
    """A prompt of a hundred thousand tokens is nothing unusual."""
    tree = DraftTree(
        sequence=1,
        round=1,
        depth=2,
        outcomes=[],
        tokens=list(range(100_000)),
        confidences=[],
        draft_ms=1.0,
    )
    data = encode(tree)
    chunks = [data[i : i + 65536] for i in range(0, len(data), 65536)]
    assert [data] == frames(chunks, limit=64 << 20)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=64), st.floats(0, 1e9))
def test_a_tokens_line_can_be_read(tokens: list[int], elapsed_ms: float) -> None:
    """What the server writes is what the driver reads."""
    assert tokens == read_tokens(tokens_line(tokens, elapsed_ms))


@given(st.text(max_size=40))
def test_a_line_is_tokens_or_an_error(text: str) -> None:
    """No line is anything else than tokens in range or a ProtocolError."""
    try:
        tokens = read_tokens("TOKENS " + text)
    except ProtocolError:
        return
    assert all(0 <= token < 2**31 for token in tokens)


def test_lines_that_cannot_be() -> None:
    """A line without an end and one that is no ASCII are refused."""
    for data in (
        b"x" * (MAX_LINE_BYTES + 1),
        b"caf\xc3\xa9\n",
        b"y" * (MAX_LINE_BYTES + 1) + b"\n",
    ):
        lines = Lines()
        lines.feed(data)
        with pytest.raises(ProtocolError):
            lines.cut()
