"""`python -m orchestrator.main SETTINGS`: the orchestrator process."""

import os
import sys
from pathlib import Path

from orchestrator.pipeline import Orchestrator
from orchestrator.tokenizer import TargetTokenizer
from protocol.channel import Hub
from protocol.child import main
from protocol.codec import Decoder
from protocol.fingerprint import vocabulary_of
from protocol.messages import FromService, ToOrchestrator
from protocol.settings import OrchestratorSettings


def run(settings: OrchestratorSettings) -> None:
    """Bind the sockets and conduct until the process is ended."""
    folder = Path(settings.model)
    services: Hub[FromService] = Hub(settings.services_address, Decoder(FromService))
    clients: Hub[ToOrchestrator] = Hub(settings.clients_address, Decoder(ToOrchestrator))
    with services, clients:
        tokenizer = TargetTokenizer(folder)
        vocabulary = vocabulary_of(folder)
        Orchestrator(
            settings,
            services=services,
            clients=clients,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            pid=os.getpid(),
        ).run()


if __name__ == "__main__":
    sys.exit(main("orchestrator", OrchestratorSettings, run))
