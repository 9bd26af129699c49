"""Memory bandwidth of plain decoding: the ceiling that speculation works against.

Plain decoding reads all weights for each token, so the memory bandwidth bounds it. Tokens of one
pass share one reading.
"""

from pathlib import Path

from launch.models.weights import weights_of
from protocol.errors import ModelError


def read_weight_bytes(model: str, device: str, *, drafts: bool = False) -> int:
    """Return the bytes of weights that a pass reads on this device; 0 if unknown.

    A drafter (`drafts`) may round its weights.
    """
    try:
        weights = weights_of(Path(model))
    except ModelError:
        return 0
    return weights.bytes_per_draft_on(device) if drafts else weights.bytes_per_pass_on(device)


def describe_ceiling(weight_bytes: int, read_bytes_s: float) -> str:
    """Describe the limit set by the memory bandwidth; empty if either value is unknown."""
    if not weight_bytes or not read_bytes_s:
        return ""
    return (
        f"{read_bytes_s / 1e9:.1f} GB/s read; {weight_bytes / 1e9:.2f} GB of weights per token "
        f"allow plain decoding {read_bytes_s / weight_bytes:.1f} tok/s at most"
    )


def describe_share(tok_s: float, weight_bytes: int, read_bytes_s: float) -> str:
    """Describe the share of the bandwidth that plain decoding uses; empty if unknown.

    The share is at most 1; a larger one means that the machine was busy when its bandwidth was
    measured.
    """
    if not tok_s or not weight_bytes or not read_bytes_s:
        return ""
    used = tok_s * weight_bytes
    reads = (
        f"plain decoding reads {weight_bytes / 1e9:.2f} GB per token: {tok_s:.1f} tok/s are "
        f"{used / 1e9:.1f} GB/s"
    )
    if used > read_bytes_s:
        return (
            f"{reads}; the machine was busy when its own speed was measured "
            f"({read_bytes_s / 1e9:.1f} GB/s), so the share is unknown"
        )
    return (
        f"{reads}, {used / read_bytes_s:.2f} of the {read_bytes_s / 1e9:.1f} GB/s "
        "that this machine reads; beyond that only tokens that share a pass"
    )
