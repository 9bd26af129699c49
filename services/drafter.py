"""`python -m services.drafter SETTINGS`: the drafter process."""

import sys
from pathlib import Path

from protocol.channel import Channel
from protocol.child import main
from protocol.codec import Decoder
from protocol.messages import ToDrafter, ToService
from protocol.settings import DrafterSettings
from services.actor import Identity, serve
from services.backends.interface import DraftBackend
from services.drafting import Drafter
from services.machine import load_blas


def run(settings: DrafterSettings) -> None:
    """Start the backend and serve the orchestrator until told to stop."""
    backend = _backend(settings)
    identity = Identity(role="drafter", **backend.identity._asdict())
    channel: Channel[ToService] = Channel(settings.address, Decoder(ToDrafter))
    with channel:
        serve(channel, identity, Drafter(backend))


def _backend(settings: DrafterSettings) -> DraftBackend:
    match settings.backend:
        case "mlx":
            load_blas(settings.threads)
            # MLX must be imported after the BLAS is in place, and only where it computes.
            from services.backends.mlx import MlxBackend  # noqa: PLC0415
            from services.device import bind  # noqa: PLC0415
            from services.prompt_cache import PromptCache  # noqa: PLC0415

            unit = bind(settings.device)
            prompts = PromptCache(settings.prompt_cache_size, settings.prompt_cache_bytes)
            return MlxBackend(Path(settings.model), settings.prefill_step_size, unit, prompts)
        case "coreml":
            from services.coreml.threads import limit  # noqa: PLC0415

            limit(settings.threads)
            from services.backends.coreml import CoremlBackend  # noqa: PLC0415
            from services.coreml.model import open_model  # noqa: PLC0415

            return CoremlBackend(open_model(Path(settings.model), settings.compute_units))
        case "ngram":
            from services.backends.ngram import NgramBackend  # noqa: PLC0415

            return NgramBackend()


if __name__ == "__main__":
    sys.exit(main("drafter", DrafterSettings, run))
