"""Talking to the supervisor of a running stack, or to a server of several models."""

from typing import TypeVar

from launch.stack.run_dir import RunDir
from protocol.errors import RuntimeFailure, UsageError
from protocol.messages import (
    Done,
    FromModelServer,
    FromSupervisor,
    Message,
    Models,
    ModelsRequest,
    ModelStatus,
    Rejected,
    Stack,
    ToSupervisor,
)
from protocol.transport.channel import Channel
from protocol.transport.codec import Decoder

Answer = TypeVar("Answer", bound=Message)


def ask_supervisor(name: str, message: ToSupervisor, timeout_s: float) -> Stack | Done:
    """Send one command to the stack `name` and wait for its answer.

    Raises:
        UsageError: there is no such stack.
        RuntimeFailure: the supervisor refused, with its reason.
        DeadlineExceeded: it did not answer in time.
    """
    decoder: Decoder[FromSupervisor] = Decoder(FromSupervisor)
    reply = _ask(name, message, decoder, timeout_s)
    if isinstance(reply, Rejected):
        raise RuntimeFailure(reply.reason)
    return reply


def list_models(name: str, timeout_s: float) -> list[ModelStatus]:
    """The models of the server `name`; errors as for `ask_supervisor`."""
    decoder: Decoder[FromModelServer] = Decoder(FromModelServer)
    reply = _ask(name, ModelsRequest(), decoder, timeout_s)
    return reply.models if isinstance(reply, Models) else []


def _ask(name: str, message: Message, decoder: Decoder[Answer], timeout_s: float) -> Answer:
    run_dir = RunDir(name)
    if run_dir.running() is None:
        raise UsageError(f"no stack named {name!r} is running; start one with `ssd launch`")
    channel: Channel[Answer] = Channel(run_dir.control_address, decoder)
    with channel:
        channel.send(message)
        return channel.receive(timeout_s, "answer from the supervisor")
