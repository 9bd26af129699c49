"""Report on the kernels for few rows on a GPU: one JSON object on stdout."""

from typing import Literal

import msgspec

from protocol.settings import MetalKernels, Settings

KernelName = Literal["product", "attention", "block"]


class KernelReportSettings(Settings, frozen=True, kw_only=True):
    """Measurements to make."""

    model: str
    """Folder of the target."""
    kernels: MetalKernels = "auto"
    """On Metal; those for CUDA are used wherever they are faster."""
    passes: bool = False
    """Whether whole passes are timed too, without the kernels and with them."""


class KernelProbe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kernel for one shape, beside MLX's own."""

    kernel: KernelName
    shape: str
    """In words."""
    layers: int = 0
    """product, block: how many layers of the model have this shape."""
    least_rows: int = 0
    """From how many rows on it is used; 0: never."""
    most_rows: int = 0
    """Up to how many, if not for all that it takes."""
    reason: str = ""
    """Why it is not used, or not for a single row."""
    distance: float = 0.0
    """Relative, from what MLX computes; the largest."""
    own_ms: dict[int, float] = {}
    """By rows: a call of ours, and of MLX's."""
    mlx_ms: dict[int, float] = {}


class KernelReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All kernels on this machine, for one target."""

    note: str = ""
    """Why nothing was probed."""
    probes: list[KernelProbe] = []
    pass_ms: dict[int, float] = {}
    """By rows: a verification by MLX alone."""
    pass_with_kernels_ms: dict[int, float] = {}
    """The same with the kernels wherever they are right."""
