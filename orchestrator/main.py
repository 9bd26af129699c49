"""`python -m orchestrator.main SETTINGS`: the orchestrator process."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from orchestrator.server import Orchestrator
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.vocabulary import read_vocabulary
from protocol.messages import FromService, ToOrchestrator
from protocol.process.child import run_child
from protocol.settings import OrchestratorSettings
from protocol.transport.channel import Hub
from protocol.transport.codec import Decoder


def run(settings: OrchestratorSettings) -> None:
    """Bind the sockets and serve until SIGTERM."""
    folder = Path(settings.model)
    services: Hub[FromService] = Hub(settings.services_address, Decoder(FromService))
    clients: Hub[ToOrchestrator] = Hub(settings.clients_address, Decoder(ToOrchestrator))
    with services, clients:
        tokenizer = TargetTokenizer(folder)
        vocabulary = read_vocabulary(folder)
        orchestrator = Orchestrator(
            settings,
            services=services,
            clients=clients,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            pid=os.getpid(),
        )
        signal.signal(signal.SIGTERM, _leave)
        try:
            orchestrator.run()
        finally:
            orchestrator.estimates.save()


def _leave(number: int, frame: FrameType | None) -> None:
    """SIGTERM is the ordinary end; a second one changes nothing."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(run_child("orchestrator", OrchestratorSettings, run))
