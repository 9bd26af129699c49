"""Commands to the supervisor of a running stack, or to a server of several models."""

from collections.abc import Callable
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
from protocol.process.deadline import Deadline
from protocol.transport.channel import Channel
from protocol.transport.codec import Decoder

Answer = TypeVar("Answer", bound=Message)
_LOOK_S = 0.5


def ask_supervisor(
    name: str,
    message: ToSupervisor,
    timeout_s: float,
    *,
    meanwhile: Callable[[float], None] = lambda _: None,
) -> Stack | Done:
    """Send one command to the stack `name` and wait for its answer.

    Args:
        name: the stack's.
        message: the command.
        timeout_s: longest wait.
        meanwhile: called about twice a second with the seconds waited so far.

    Raises:
        UsageError: there is no such stack.
        RuntimeFailure: the supervisor rejected it, with the reason.
        DeadlineExceeded: it did not answer in time.
    """
    decoder: Decoder[FromSupervisor] = Decoder(FromSupervisor)
    reply = _ask(name, message, decoder, timeout_s, meanwhile)
    if isinstance(reply, Rejected):
        raise RuntimeFailure(reply.reason)
    return reply


def list_models(name: str, timeout_s: float) -> list[ModelStatus]:
    """Return the models of the server `name`; errors as for `ask_supervisor`."""
    decoder: Decoder[FromModelServer] = Decoder(FromModelServer)
    reply = _ask(name, ModelsRequest(), decoder, timeout_s)
    return reply.models if isinstance(reply, Models) else []


def running_stack(name: str) -> RunDir:
    """Return the run folder of the stack `name`; raise UsageError if it is not running."""
    run_dir = RunDir(name)
    if run_dir.running() is None:
        raise UsageError(f"no stack named {name!r} is running; start one with `ssd launch`")
    return run_dir


def _ask(
    name: str,
    message: Message,
    decoder: Decoder[Answer],
    timeout_s: float,
    meanwhile: Callable[[float], None] = lambda _: None,
) -> Answer:
    channel: Channel[Answer] = Channel(running_stack(name).control_address, decoder)
    deadline = Deadline(timeout_s)
    with channel:
        channel.send(message)
        while not channel.ready(min(_LOOK_S, deadline.remaining)) and not deadline.passed:
            meanwhile(timeout_s - deadline.remaining)
        return channel.receive(0.0, "answer from the supervisor")
