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
    """Kernels on Metal; those for CUDA are used wherever they are faster."""
    passes: bool = False
    """Also time whole passes, without and with the kernels."""


class KernelProbe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kernel for one shape, compared with MLX's own."""

    kernel: KernelName
    shape: str
    """The shape in words."""
    layers: int = 0
    """product, block: number of layers with this shape."""
    least_rows: int = 0
    """Fewest rows from which it is used; 0: never."""
    most_rows: int = 0
    """Most rows for which it is used, if limited."""
    reason: str = ""
    """Reason why it is not used, or not for a single row."""
    distance: float = 0.0
    """Largest relative difference from MLX's result."""
    own_ms: dict[int, float] = {}
    """Times by rows: a call of our kernel, and of MLX's."""
    mlx_ms: dict[int, float] = {}


class KernelReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Report on all kernels on this machine, for one target."""

    note: str = ""
    """Reason why no kernel was probed."""
    probes: list[KernelProbe] = []
    pass_ms: dict[int, float] = {}
    """Time of a verification by rows, by MLX alone."""
    pass_with_kernels_ms: dict[int, float] = {}
    """Time by rows with the kernels wherever they are correct."""
