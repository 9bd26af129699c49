"""What is queued for a program that does not read."""

import pytest

from protocol.errors import ProtocolError
from protocol.messages import Features, OpenSequence, Sampling
from services.drafter.relay.process import DrafterProcess
from services.drafter.relay.stdio_peer import StdioPeer

pytestmark = pytest.mark.processes

STATES = Features(sequence=1, first=0, count=1, data=bytes(1 << 20))
PROMPT = OpenSequence(sequence=1, tokens=[2**30] * (1 << 18), sampling=Sampling())


def test_states_of_the_target_wait_for_nobody() -> None:
    """However many come, they are left out before they fill the queue; a prompt is not."""
    with DrafterProcess(["sleep", "60"]) as program:
        peer = StdioPeer(program)
        for _ in range(40):
            peer.post(STATES)
        for _ in range(5):  # more than a megabyte each
            peer.post(PROMPT)
        with pytest.raises(ProtocolError, match="does not read"):
            fill(peer)


def fill(peer: StdioPeer) -> None:
    for _ in range(16):
        peer.post(PROMPT)
