"""`python -m services.drafter.server.main SETTINGS`: a drafter on stdin and stdout, or listening.

`docs/guide/draft-server.md` defines the protocols. The end of standard input is a clean exit; a
listening server serves one host after another until it gets SIGTERM or SIGINT.
"""

import contextlib
import logging
import sys
from pathlib import Path

from protocol.errors import DeadlineExceeded, ModelError, ProtocolError, StreamEnded
from protocol.jobs.draft_server import DraftServerSettings
from protocol.messages import ToDrafter
from protocol.process.child import read_argument, run_reporting_errors
from protocol.settings import decode_settings
from protocol.transport.codec import Decoder
from protocol.transport.curve import read_keys
from protocol.transport.pipes import PipeChannel, Pipes, take_pipes
from services.drafter.backends.base import DraftBackend
from services.drafter.backends.factory import create_backend
from services.drafter.backends.warmup import time_drafts
from services.drafter.drafter import Drafter
from services.drafter.server.line_server import LineServer
from services.drafter.server.listener import HostListener
from services.runtime.loop import Identity, serve
from services.runtime.preparation import run_all

_log = logging.getLogger(__name__)


def run(settings: DraftServerSettings, pipes: Pipes) -> None:
    """Start the backend and serve the host until it sends a stop or disconnects."""
    backend = create_backend(settings)
    if settings.listen:
        with contextlib.suppress(KeyboardInterrupt):
            _listen(settings, backend)
        return
    try:
        if settings.lines:
            LineServer(backend).serve(*pipes)
        else:
            _serve_messages(backend, pipes)
    except StreamEnded:
        return


def _listen(settings: DraftServerSettings, backend: DraftBackend) -> None:
    """Serve trusted hosts, one at a time; none of them can end the server."""
    keys = read_keys(Path(settings.key_file))
    identity, drafter = _identify(backend), Drafter(backend)
    with HostListener(settings.listen, keys, settings.trusted) as listener:
        _log.info("listening at %s with the key %s", listener.address, keys.public)
        while True:
            listener.await_host()
            reason = "the host sent a stop"
            _log.info("a host has connected")
            try:
                serve(listener, identity, drafter)
            except (StreamEnded, DeadlineExceeded, ProtocolError, ModelError) as error:
                reason = str(error)
            _log.info("done with this host: %s", reason)
            drafter.forget()
            listener.dismiss(reason)


def _serve_messages(backend: DraftBackend, pipes: Pipes) -> None:
    stream: PipeChannel[ToDrafter] = PipeChannel(*pipes, Decoder(ToDrafter))
    serve(stream, _identify(backend), Drafter(backend))


def _identify(backend: DraftBackend) -> Identity:
    identity = Identity(role="drafter", **backend.identity._asdict())
    run_all(time_drafts(backend, identity))
    return identity


def main() -> int:
    """Run the server and return the process's exit code."""

    def body() -> None:
        pipes = take_pipes()
        run(decode_settings(read_argument("draft-server"), DraftServerSettings), pipes)

    return run_reporting_errors("draft-server", body)


if __name__ == "__main__":
    sys.exit(main())
