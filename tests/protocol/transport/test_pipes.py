"""Messages over pipes: their ends, deadlines and errors."""

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from protocol.errors import DeadlineExceeded, ProtocolError, StreamEnded
from protocol.messages import CloseSequence, OpenSequence, Sampling, Stop, ToDrafter
from protocol.transport.codec import Decoder, encode
from protocol.transport.pipes import PipeChannel, write_all


class Ends:
    """A stream whose other ends the test holds."""

    def __init__(self) -> None:
        self.theirs, out = os.pipe()
        inward, self.ours = os.pipe()
        self.descriptors = [self.theirs, out, inward, self.ours]
        self.stream: PipeChannel[ToDrafter] = PipeChannel(inward, out, Decoder(ToDrafter))

    def close(self, descriptor: int) -> None:
        os.close(descriptor)
        self.descriptors.remove(descriptor)


@pytest.fixture
def ends() -> Iterator[Ends]:
    pipes = Ends()
    yield pipes
    for descriptor in pipes.descriptors:
        with suppress(OSError):
            os.close(descriptor)


def test_messages_in_one_piece_are_taken_apart(ends: Ends) -> None:
    """Two messages that arrive together are received one after the other."""
    sent = [CloseSequence(sequence=1), Stop()]
    os.write(ends.ours, b"".join(map(encode, sent)))
    assert sent == [ends.stream.receive(5.0, "message") for _ in sent]
    assert not ends.stream.ready(0.0)


def test_a_message_in_two_pieces_is_waited_for(ends: Ends) -> None:
    """Half a message is none yet."""
    message = OpenSequence(sequence=1, tokens=[1, 2, 3], sampling=Sampling())
    data = encode(message)
    os.write(ends.ours, data[:10])
    assert not ends.stream.ready(0.0)
    os.write(ends.ours, data[10:])
    assert message == ends.stream.receive(5.0, "message")


def test_what_is_sent_is_the_message_alone(ends: Ends) -> None:
    """No length and no mark goes before it."""
    ends.stream.send(Stop())
    assert encode(Stop()) == os.read(ends.theirs, 1000)


def test_silence_has_a_deadline(ends: Ends) -> None:
    """The error names what was awaited."""
    with pytest.raises(DeadlineExceeded, match=r"no answer to Hello within 0\.01 s"):
        ends.stream.receive(0.01, "answer to Hello")


def test_the_end_between_messages_is_a_goodbye(ends: Ends) -> None:
    """What came before the end is still received."""
    os.write(ends.ours, encode(Stop()))
    ends.close(ends.ours)
    assert Stop() == ends.stream.receive(5.0, "message")
    with pytest.raises(StreamEnded):
        ends.stream.ready(5.0)


def test_the_end_inside_a_message_is_an_error(ends: Ends) -> None:
    """A truncated frame is not mistaken for a goodbye."""
    os.write(ends.ours, encode(Stop())[:-1])
    ends.close(ends.ours)
    with pytest.raises(ProtocolError, match="inside a message"):
        ends.stream.ready(5.0)


def test_a_reader_that_is_gone_ends_the_stream(ends: Ends) -> None:
    """Writing to a closed pipe raises, and no signal kills the process."""
    ends.close(ends.theirs)
    with pytest.raises(StreamEnded):
        ends.stream.send(Stop())


def test_a_reader_that_does_not_read_has_a_deadline(ends: Ends) -> None:
    """A full pipe is no reason to wait for ever."""
    with pytest.raises(DeadlineExceeded, match="no reader within"):
        write_all(ends.descriptors[1], bytes(1 << 20), "reader", 0.05)
