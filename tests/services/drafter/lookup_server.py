"""`ssd draft-server --stdio` with prompt lookup for a model, so that it starts at once."""

import sys

from protocol.jobs.draft_server import DraftServerSettings
from protocol.process.child import run_reporting_errors
from protocol.transport.pipes import take_pipes
from services.drafter.server import main
from tests.services.drafter.lookup_backend import LookupBackend


def body() -> None:
    """Serve standard input and output; `--lines` as for the command."""
    main.create_backend = lambda _: LookupBackend()  # type: ignore[assignment]
    lines = "--lines" in sys.argv
    main.run(DraftServerSettings(backend="mlx", lines=lines), take_pipes())


if __name__ == "__main__":
    sys.exit(run_reporting_errors("draft-server", body))
