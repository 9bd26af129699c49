"""Talking to the supervisor of a running stack."""

from launch.stack.run_dir import RunDir
from protocol.errors import RuntimeFailure, UsageError
from protocol.messages import Done, FromSupervisor, Rejected, Stack, ToSupervisor
from protocol.transport.channel import Channel
from protocol.transport.codec import Decoder


def ask_supervisor(name: str, message: ToSupervisor, timeout_s: float) -> Stack | Done:
    """Send one command to the stack `name` and wait for its answer.

    Raises:
        UsageError: there is no such stack.
        RuntimeFailure: the supervisor refused, with its reason.
        DeadlineExceeded: it did not answer in time.
    """
    run_dir = RunDir(name)
    if run_dir.running() is None:
        raise UsageError(f"no stack named {name!r} is running; start one with `ssd launch`")
    channel: Channel[FromSupervisor] = Channel(run_dir.control_address, Decoder(FromSupervisor))
    with channel:
        channel.send(message)
        reply = channel.receive(timeout_s, "answer from the supervisor")
    if isinstance(reply, Rejected):
        raise RuntimeFailure(reply.reason)
    return reply
