"""`python -m services.verifier SETTINGS`: the target verifier process."""

import sys
from pathlib import Path

from protocol.channel import Channel
from protocol.child import main
from protocol.codec import Decoder
from protocol.messages import ToService, ToVerifier
from protocol.settings import VerifierSettings
from services.actor import Identity, serve
from services.machine import load_blas


def run(settings: VerifierSettings) -> None:
    """Load the target model and serve the orchestrator until told to stop."""
    load_blas(settings.threads)
    # MLX must be imported after the BLAS is in place.
    from services.model import compute_unit, load  # noqa: PLC0415
    from services.verification import Verifier  # noqa: PLC0415

    model = load(Path(settings.model))
    verifier = Verifier(model, settings.prefill_step_size)
    identity = Identity(
        role="verifier",
        backend="mlx",
        model=settings.model,
        tokenizer_fingerprint=model.vocabulary.fingerprint,
        vocabulary_size=model.vocabulary.size,
        context_length=model.context_length,
        compute_unit=compute_unit(),
        max_draft_tokens=verifier.max_draft_tokens,
    )
    channel: Channel[ToService] = Channel(settings.address, Decoder(ToVerifier))
    with channel:
        serve(channel, identity, verifier)


if __name__ == "__main__":
    sys.exit(main("verifier", VerifierSettings, run))
