"""Create a backend by name. Its dependencies are imported only here, on demand."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import UsageError
from protocol.settings import DrafterSettings
from services.drafter.backends.base import DraftBackend
from services.kernels.cpu.library import load_blas
from services.mlx.lean_imports import leave_out_unused_libraries
from services.runtime.preparation import Stage, run_all

if TYPE_CHECKING:
    from protocol.jobs.draft_server import DraftServerSettings


def create_backend(settings: "DrafterSettings | DraftServerSettings") -> DraftBackend:
    """Create the backend named in the settings, load its model, and prepare it; see
    `open_backend`.
    """
    backend, stages = open_backend(settings)
    for stage in stages:
        run_all(stage.begin())
    return backend


def open_backend(
    settings: "DrafterSettings | DraftServerSettings",
) -> tuple[DraftBackend, Sequence[Stage]]:
    """Create the backend named in the settings and load its model; return what it may prepare.

    Raises:
        ModelError: the model folder is not usable.
        UsageError: the backend drafts in a separate program.
    """
    match settings.backend:
        case "mlx":
            return _create_mlx(settings)
        case "head":
            return _create_head(settings)
        case "coreml":
            return _create_coreml(settings), ()
        case "ngram":
            raise UsageError(
                "the orchestrator looks up drafts in the prompt by itself: ngram has no drafter"
            )
        case "stdio":
            raise UsageError("the stdio backend runs another program, which cannot be itself")
        case "remote":
            raise UsageError("the remote backend drafts on another machine, not on this one")


def _create_mlx(
    settings: "DrafterSettings | DraftServerSettings",
) -> tuple[DraftBackend, Sequence[Stage]]:
    load_blas(settings.threads)
    leave_out_unused_libraries()
    # MLX must be imported after the BLAS is in place, and only where it computes.
    from services.drafter.backends.mlx import MlxBackend  # noqa: PLC0415
    from services.drafter.backends.warmup import warm_drafter  # noqa: PLC0415
    from services.kv.prefix_cache import PrefixCache  # noqa: PLC0415
    from services.mlx.device import bind  # noqa: PLC0415

    unit, folder, step = bind(settings.device), Path(settings.model), settings.prefill_step_size
    prompts = PrefixCache(settings.prompt_cache_size, settings.prompt_cache_bytes)
    backend = MlxBackend(folder, step, unit, prompts, weights=settings.weights)
    if unit == "cpu":
        return backend, ()
    stages = [Stage("first passes", partial(warm_drafter, backend))]
    if unit.startswith("cuda"):
        kernels = Stage("kernels", backend.try_kernels), Stage("drafts", backend.try_drafts)
        stages = [*kernels, *stages]
    return backend, stages


def _create_head(
    settings: "DrafterSettings | DraftServerSettings",
) -> tuple[DraftBackend, Sequence[Stage]]:
    load_blas(settings.threads)
    leave_out_unused_libraries()
    # MLX must be imported after the BLAS is in place, and only where it computes.
    from services.drafter.backends.head.loading import load_head  # noqa: PLC0415
    from services.drafter.backends.warmup import warm_drafter  # noqa: PLC0415
    from services.mlx.device import bind  # noqa: PLC0415

    unit = bind(settings.device)
    backend = load_head(
        Path(settings.model),
        Path(settings.target),
        settings.prefill_step_size,
        unit,
        beside_target=isinstance(settings, DrafterSettings),
    )
    return backend, () if unit == "cpu" else [Stage("first passes", partial(warm_drafter, backend))]


def _create_coreml(settings: "DrafterSettings | DraftServerSettings") -> DraftBackend:
    from services.coreml.runtime.executor import limit_threads  # noqa: PLC0415

    limit_threads(settings.threads)
    from services.coreml.costs import warm  # noqa: PLC0415
    from services.coreml.model import open_model  # noqa: PLC0415
    from services.drafter.backends.coreml import CoremlBackend  # noqa: PLC0415

    model = open_model(Path(settings.model), settings.compute_units)
    backend = CoremlBackend(model)
    warm(model)
    return backend
