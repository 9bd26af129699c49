"""`python -m services.drafter.main SETTINGS`: the drafter process."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from protocol.messages import ToDrafter, ToService
from protocol.process.child import run_child
from protocol.settings import DrafterSettings
from protocol.transport.channel import Channel
from protocol.transport.codec import Decoder
from services.drafter.backends.base import DraftBackend
from services.drafter.backends.factory import open_backend
from services.drafter.backends.warmup import time_drafts
from services.drafter.drafter import Drafter
from services.drafter.sliding_context import SlidingContextBackend
from services.kernels.cpu.library import use_spare_cores
from services.runtime.idle_flag import open_idle_flag
from services.runtime.inbox import Inbox
from services.runtime.loop import SEND_S, Identity, serve
from services.runtime.preparation import Preparer, Stage, tokenizer_stage


def run(settings: DrafterSettings) -> None:
    """Start the backend and serve the orchestrator until told to stop."""
    match settings.backend:
        case "remote":
            _relay_to_server(settings)
        case "stdio":
            _run_program(settings)
        case _:
            _serve(settings, *open_backend(settings))


# The dependencies of other backends are imported only on demand.


def _relay_to_server(settings: DrafterSettings) -> None:
    from services.drafter.relay.relay import relay  # noqa: PLC0415
    from services.drafter.relay.tcp_peer import TcpPeer  # noqa: PLC0415

    with TcpPeer(settings) as peer:
        relay(settings, peer)


def _run_program(settings: DrafterSettings) -> None:
    from services.drafter.backends.line_client import LineBackend  # noqa: PLC0415
    from services.drafter.relay.process import run_program  # noqa: PLC0415
    from services.drafter.relay.relay import relay  # noqa: PLC0415
    from services.drafter.relay.stdio_peer import StdioPeer  # noqa: PLC0415

    with run_program(settings.command) as program:
        if settings.lines:
            limits = (settings.ready_timeout_s, settings.answer_timeout_s)
            _serve(settings, LineBackend(program, *limits))
        else:
            relay(settings, StdioPeer(program))


def _serve(settings: DrafterSettings, backend: DraftBackend, stages: Sequence[Stage] = ()) -> None:
    flag = open_idle_flag(settings.idle_flag)
    spare = open_idle_flag(settings.spare_flag)
    if spare is not None:
        # While the target waits for a draft.
        use_spare_cores(settings.spare_cores, spare.word)
    if backend.identity.context_length:
        backend = SlidingContextBackend(backend)
    identity = Identity(role="drafter", **backend.identity._asdict())
    times = Stage("times of drafts", partial(time_drafts, backend, identity))
    stages = [*stages, times] if stages else []
    if folder := settings.target if settings.backend == "head" else settings.model:
        stages = [tokenizer_stage(Path(folder)), *stages]
    preparer = Preparer([times, *stages])
    while not preparer.step():
        pass  # Hello has the times
    channel: Channel[ToService] = Channel(
        settings.address, Decoder(ToDrafter), send_timeout_s=SEND_S
    )
    with channel:
        serve(channel, identity, Drafter(backend), Inbox(channel, flag), preparer)


if __name__ == "__main__":
    sys.exit(run_child("drafter", DrafterSettings, run))
