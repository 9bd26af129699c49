"""`python -m orchestrator.main SETTINGS`: the orchestrator process."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from orchestrator.requests.crash_journal import CrashJournal
from orchestrator.server import Orchestrator
from orchestrator.text.prompt_encoder import PromptEncoder, PromptLimits
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.vocabulary import read_vocabulary
from protocol.messages import FromService, ToOrchestrator
from protocol.process.child import raise_descriptor_limit, run_child
from protocol.settings import OrchestratorSettings
from protocol.transport.channel import STRANGER_BYTES, Hub
from protocol.transport.codec import Decoder


def run(settings: OrchestratorSettings) -> None:
    """Bind the sockets and serve until SIGTERM."""
    raise_descriptor_limit()
    folder = Path(settings.model)
    services: Hub[FromService] = Hub(
        settings.services_address, Decoder(FromService), stranger_bytes=STRANGER_BYTES
    )
    clients: Hub[ToOrchestrator] = Hub(settings.clients_address, Decoder(ToOrchestrator))
    with services, clients:
        tokenizer = TargetTokenizer(folder, parse_special=settings.parse_special)
        vocabulary = read_vocabulary(folder)
        limits = PromptLimits(
            max_bytes=settings.max_prompt_bytes,
            timeout_s=settings.prompt_timeout_s,
            memory_bytes=settings.prompt_memory_bytes,
        )
        prompts = PromptEncoder(
            tokenizer, settings.model, limits, parse_special=settings.parse_special
        )
        prompts.prepare()
        orchestrator = Orchestrator(
            settings,
            services=services,
            clients=clients,
            tokenizer=tokenizer,
            prompts=prompts,
            journal=CrashJournal(Path(settings.run_dir), settings.max_deaths),
            vocabulary=vocabulary,
            pid=os.getpid(),
        )
        signal.signal(signal.SIGTERM, _leave)
        orchestrator.run()


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM; a second one changes nothing."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(run_child("orchestrator", OrchestratorSettings, run))
