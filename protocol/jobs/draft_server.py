"""Settings of a draft server."""

from typing import Annotated

import msgspec

from protocol.settings import (
    PREFILL_STEP_SIZE,
    PROMPT_CACHE_BYTES,
    PROMPT_CACHE_SIZE,
    BackendName,
    ComputeUnits,
    Device,
    DraftWeights,
    Settings,
)


class DraftServerSettings(Settings, frozen=True, kw_only=True):
    """One draft server: on standard input and output, or listening."""

    backend: BackendName
    model: str = ""
    """Folder of the model; empty for a backend that needs none."""
    target: str = ""
    """Folder of the target, for the head backend."""
    lines: bool = False
    """Whether it speaks the line protocol instead of messages."""
    listen: str = ""
    """Where it listens, tcp://HOST:PORT; empty: standard input and output."""
    key_file: str = ""
    """Its keys, where it listens."""
    trusted: tuple[str, ...] = ()
    """Public keys of those who may connect."""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Threads of the BLAS on Linux."""
    device: Device = ""
    prefill_step_size: Annotated[int, msgspec.Meta(ge=1)] = PREFILL_STEP_SIZE
    prompt_cache_size: Annotated[int, msgspec.Meta(ge=0)] = PROMPT_CACHE_SIZE
    """As `ServiceSettings`."""
    compute_units: ComputeUnits = "auto"
    """Of the coreml backend."""
    weights: DraftWeights = "auto"
    """Of the mlx backend."""
    prompt_cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = PROMPT_CACHE_BYTES
    """As `ServiceSettings`."""
