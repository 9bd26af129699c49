"""`python -m services.verifier.main SETTINGS`: the target verifier process."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.messages import ToService, ToVerifier
from protocol.process.child import run_child
from protocol.settings import VerifierSettings
from protocol.transport.channel import Channel
from protocol.transport.codec import Decoder
from services.kernels.cpu.library import load_blas
from services.mlx.lean_imports import leave_out_unused_libraries
from services.runtime.idle_flag import open_idle_flag
from services.runtime.inbox import Inbox
from services.runtime.loop import SEND_S, Identity, serve
from services.runtime.preparation import Preparer

if TYPE_CHECKING:
    from services.engine.target_model import OpenTarget
    from services.kv.prefix_cache import PrefixCache
    from services.mlx.loader import LoadedModel
    from services.verifier.verifier import Verifier


def run(settings: VerifierSettings) -> None:
    """Load the target model and serve the orchestrator until told to stop."""
    load_blas(settings.threads)
    leave_out_unused_libraries()
    # MLX must be imported after the BLAS is in place.
    from services.engine.target_model import prepare_plain  # noqa: PLC0415
    from services.kv.prefix_cache import PrefixCache  # noqa: PLC0415
    from services.verifier.open_target import open_target  # noqa: PLC0415
    from services.verifier.stages import VerifierStages  # noqa: PLC0415
    from services.verifier.verifier import SpareCores, Verifier  # noqa: PLC0415

    with open_target(settings) as opened:
        model, target = opened.model, opened.target or prepare_plain(opened.model.module)
        prompts = PrefixCache(settings.prompt_cache_size, settings.prompt_cache_bytes)
        step, prelaunches = settings.prefill_step_size, settings.prelaunches
        verifier = Verifier(model, step, prompts, target, prelaunches=prelaunches)
        verifier.spare_cores = SpareCores(settings.spare_cores, open_idle_flag(settings.spare_flag))
        _attach_coreml_prefill(verifier, settings, model)
        identity = _identify(settings, opened, verifier)
        stages = VerifierStages(verifier, identity, settings.metal_kernels)
        whole = opened.target is None
        preparer = Preparer([*stages.list(model.folder, is_whole=whole, prelaunches=prelaunches)])
        channel: Channel[ToService] = Channel(
            settings.address, Decoder(ToVerifier), send_timeout_s=SEND_S
        )
        with channel, _keep_prefixes(settings, prompts, verifier, model):
            inbox = Inbox(channel, open_idle_flag(settings.idle_flag))
            inbox.expect_s = verifier.expect_s
            serve(channel, identity, verifier, inbox, preparer)


def _identify(settings: VerifierSettings, opened: "OpenTarget", verifier: "Verifier") -> Identity:
    from services.kernels.cpu.equip import count_read_bytes  # noqa: PLC0415

    model, ranks = opened.model, opened.ranks
    kv = verifier.kv_tokens(settings.kv_bytes)
    return Identity(
        role="verifier",
        backend="mlx",
        model=settings.model,
        tokenizer_fingerprint=model.vocabulary.fingerprint,
        vocabulary_size=model.vocabulary.size,
        context_length=model.context_length,
        compute_unit=opened.compute_unit,
        max_draft_tokens=verifier.max_draft_tokens,
        kv_tokens=ranks.kv_tokens if ranks else kv.tokens,
        kv_limit=kv.limit,
        rewinding=verifier.target.states.description,
        weight_bytes=0 if ranks else count_read_bytes(model.module),
        takes_trees=verifier.takes_trees,
        ranks=ranks.status if ranks else [],
    )


def _keep_prefixes(
    settings: VerifierSettings, prompts: "PrefixCache", verifier: "Verifier", model: "LoadedModel"
) -> contextlib.AbstractContextManager[None]:
    """Return a context that restores the prompt cache from its file, if any, and saves it."""
    if not settings.prompt_cache_file:
        return contextlib.nullcontext()
    from protocol.adapter import identify_adapter  # noqa: PLC0415
    from services.kv.prefix_cache_file import persist_prefixes  # noqa: PLC0415

    how = f"{settings.prefill} {identify_adapter(settings.adapter)}"
    path, new_state = Path(settings.prompt_cache_file), verifier.new_state
    return persist_prefixes(path, prompts, model, how, new_state, retire=verifier.retire_all)


def _attach_coreml_prefill(
    verifier: "Verifier", settings: VerifierSettings, model: "LoadedModel"
) -> None:
    """Let another device compute prompts: where it is faster, or all that it takes."""
    if settings.prefill == "mlx":
        return
    from services.coreml.external_prefill import ExternalPrefill  # noqa: PLC0415
    from services.coreml.prefill import open_prefill  # noqa: PLC0415

    other = open_prefill(Path(settings.prefill_model), settings.compute_units, model.folder)
    if verifier.target.states.way in ("slots", "windows"):
        always, make_state = settings.prefill == "coreml-always", verifier.new_state
        external = ExternalPrefill(model.module, make_state, other, whenever_it_fits=always)
        verifier.fill_externally = external.fill


if __name__ == "__main__":
    sys.exit(run_child("verifier", VerifierSettings, run))
