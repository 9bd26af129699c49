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
    """A draft server: on standard input and output, or listening."""

    backend: BackendName
    model: str = ""
    """Folder of the model; empty for a backend that needs none."""
    target: str = ""
    """Folder of the target, for the head backend."""
    lines: bool = False
    """Speak the line protocol instead of messages."""
    listen: str = ""
    """Address to listen on, tcp://HOST:PORT; empty: standard input and output."""
    key_file: str = ""
    """File of its keys, if it listens."""
    trusted: tuple[str, ...] = ()
    """Public keys of clients that may connect."""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    """BLAS threads on Linux."""
    device: Device = ""
    prefill_step_size: Annotated[int, msgspec.Meta(ge=1)] = PREFILL_STEP_SIZE
    prompt_cache_size: Annotated[int, msgspec.Meta(ge=0)] = PROMPT_CACHE_SIZE
    """Cached sequences (`ServiceSettings`)."""
    compute_units: ComputeUnits = "auto"
    """Compute units of the coreml backend."""
    weights: DraftWeights = "auto"
    """Weights of the mlx backend."""
    prompt_cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = PROMPT_CACHE_BYTES
    """Most bytes for the cache (`ServiceSettings`)."""
