"""Open the target: in this process, or spread over a group of ranks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from protocol.settings import VerifierSettings
from services.engine.target_model import OpenTarget
from services.kernels.cpu.equip import equip, takes
from services.mlx.device import bind
from services.mlx.loader import load


@contextlib.contextmanager
def open_target(settings: VerifierSettings) -> Iterator[OpenTarget]:
    """Load the target; with ranks, end these afterwards.

    Raises:
        UsageError, ModelError: it cannot be loaded as configured.
        RuntimeFailure: a rank was lost meanwhile.
    """
    if settings.ranks is not None:
        from services.ranks.target import open_spread_target  # noqa: PLC0415  # only with ranks

        with open_spread_target(settings, settings.ranks) as spread:
            yield spread
        return
    unit = bind(settings.device)
    model = load(Path(settings.model), adapter=settings.adapter, as_stored=takes)
    if unit == "cpu":
        equip(model.module, rounds=settings.cpu_activations == "int8")
    yield OpenTarget(model, None, unit, None)
