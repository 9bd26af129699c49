"""The verifier's target, spread over a group of ranks."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import UsageError
from protocol.settings import RankGroupSettings, VerifierSettings
from services.engine.target_model import OpenTarget, TargetModel
from services.mlx.loader import LoadedModel
from services.mlx.taps import TrialPasses
from services.ranks.group import RankGroup
from services.ranks.messages import Prove
from services.ranks.mirror import MirroredModel, MirroredStore, StoreLog
from services.ranks.sharding import join_group, load_part


@contextlib.contextmanager
def open_spread_target(
    settings: VerifierSettings, ranks: RankGroupSettings
) -> Iterator[OpenTarget]:
    """Start the other ranks and load this one's part; end them on exit.

    Raises:
        UsageError, ModelError: it cannot be loaded as configured.
        RuntimeFailure: a rank was lost meanwhile.
    """
    _refuse_what_needs_the_whole_model(settings)
    with RankGroup(settings, ranks) as group:
        group.begin()
        communicator = join_group(
            ranks.backend, group.variables[0], group.device, ranks.meet_timeout_s
        )
        part = load_part(
            Path(settings.model),
            communicator,
            ranks.split,
            settings.kv_bytes,
            ranks.ranks_beside(0),
        )
        group.complete(part.facts)
        target = _mirror(part.loaded, part.target, group)
        yield OpenTarget(part.loaded, target, part.facts.compute_unit, group)


def _mirror(model: LoadedModel, own: TargetModel, group: RankGroup) -> TargetModel:
    """Return rank 0's part, whose passes the followers repeat."""
    log = StoreLog()
    store = own.states.make()
    windows = [cache.window for cache in store.caches]

    def make_state() -> MirroredStore:
        return MirroredStore(windows, log, bucketed=own.bucketed)

    return dataclasses.replace(
        own,
        verify=MirroredModel(model.module, log, group, logits=True),
        prefill=MirroredModel(model.module, log, group, logits=False),
        # Followers would need a token that rank 0 has not read yet.
        pipelines=False,
        states=dataclasses.replace(own.states, make=make_state),
        trial=TrialPasses(own.run_alone, lambda layers: group.announce(Prove(layers=list(layers)))),
    )


def _refuse_what_needs_the_whole_model(settings: VerifierSettings) -> None:
    for given, flag in (
        (settings.prefill != "mlx", "prefill"),
        (settings.prompt_cache_file, "--prompt-cache-file"),
        (settings.adapter, "--adapter-path"),
    ):
        if given:
            raise UsageError(f"{flag} needs the whole model in one process, not spread over ranks")
