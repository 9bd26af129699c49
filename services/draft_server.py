"""`python -m services.draft_server SETTINGS`: a drafter on standard input and output.

`docs/DRAFT_SERVER.md` says what is spoken there. The end of standard input is a clean exit.
"""

import os
import sys
from typing import NamedTuple

from protocol.child import argument, reported
from protocol.codec import Decoder
from protocol.draft_server import DraftServerSettings
from protocol.errors import StreamEnded
from protocol.messages import ToDrafter
from protocol.settings import decode_settings
from protocol.stream import Stream
from services.actor import Identity, serve
from services.backends.interface import DraftBackend
from services.backends.start import start
from services.drafting import Drafter
from services.line_server import LineServer


class Pipes(NamedTuple):
    """The descriptors that the host talks to us by."""

    reading: int
    writing: int


def take_pipes() -> Pipes:
    """Keep standard input and output for the protocol alone.

    What a library prints goes to standard error from now on, and nothing else reads the input.
    """
    pipes = Pipes(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return pipes


def run(settings: DraftServerSettings, pipes: Pipes) -> None:
    """Start the backend and serve the host until it says stop or goes away."""
    backend = start(settings)
    try:
        if settings.lines:
            LineServer(backend).serve(*pipes)
        else:
            _serve_messages(backend, pipes)
    except StreamEnded:
        return


def _serve_messages(backend: DraftBackend, pipes: Pipes) -> None:
    identity = Identity(role="drafter", **backend.identity._asdict())
    stream: Stream[ToDrafter] = Stream(*pipes, Decoder(ToDrafter))
    serve(stream, identity, Drafter(backend))


def main() -> int:
    """The process's exit code."""

    def body() -> None:
        pipes = take_pipes()
        run(decode_settings(argument("draft-server"), DraftServerSettings), pipes)

    return reported("draft-server", body)


if __name__ == "__main__":
    sys.exit(main())
