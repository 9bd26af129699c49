"""Decoding's share of the memory's bandwidth: the ceiling that speculation works against.

Plain decoding reads all weights for each token, so the machine's reading speed bounds it.
Tokens that share a pass share one reading.
"""

from pathlib import Path

from launch.models.weights import weights_of
from protocol.errors import ModelError


def read_weight_bytes(model: str, device: str) -> int:
    """Bytes of weights that a pass reads on this device, on a CPU as floats; 0: unknown."""
    try:
        weights = weights_of(Path(model))
    except ModelError:
        return 0
    return 4 * weights.parameters if device == "cpu" else weights.bytes_as_stored


def describe_ceiling(weight_bytes: int, read_bytes_s: float) -> str:
    """What the machine's reading speed allows; empty where either is unknown."""
    if not weight_bytes or not read_bytes_s:
        return ""
    return (
        f"{read_bytes_s / 1e9:.1f} GB/s read; {weight_bytes / 1e9:.2f} GB of weights per token "
        f"allow plain decoding {read_bytes_s / weight_bytes:.1f} tok/s at most"
    )


def describe_share(tok_s: float, weight_bytes: int, read_bytes_s: float) -> str:
    """How much of that plain decoding at `tok_s` uses; empty where something is unknown.

    More than all of it cannot be: the machine's speed was measured while it was busy then.
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
