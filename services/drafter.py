"""`python -m services.drafter SETTINGS`: the drafter process."""

import sys

from protocol.messages import ToDrafter, ToService
from protocol.process.child import main
from protocol.settings import DrafterSettings
from protocol.transport.channel import Channel
from protocol.transport.codec import Decoder
from services.actor import Identity, serve
from services.backends.interface import DraftBackend
from services.backends.lines import LineBackend
from services.backends.start import start
from services.bridge import relay
from services.drafting import Drafter
from services.program import started
from services.program_end import ProgramEnd
from services.remote_end import RemoteEnd
from services.windowed import WindowedBackend


def run(settings: DrafterSettings) -> None:
    """Start the backend and serve the orchestrator until told to stop."""
    if settings.backend == "remote":
        with RemoteEnd(settings) as far:
            relay(settings, far)
        return
    if settings.backend != "stdio":
        _serve(settings, start(settings))
        return
    with started(settings.command) as program:
        if settings.lines:
            limits = (settings.ready_timeout_s, settings.answer_timeout_s)
            _serve(settings, LineBackend(program, *limits))
        else:
            relay(settings, ProgramEnd(program))


def _serve(settings: DrafterSettings, backend: DraftBackend) -> None:
    if backend.identity.context_length:
        backend = WindowedBackend(backend)
    identity = Identity(role="drafter", **backend.identity._asdict())
    channel: Channel[ToService] = Channel(settings.address, Decoder(ToDrafter))
    with channel:
        serve(channel, identity, Drafter(backend))


if __name__ == "__main__":
    sys.exit(main("drafter", DrafterSettings, run))
