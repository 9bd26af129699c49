"""Counter-based randomness: pure functions of the seed and of the place of use.

Gumbel noise is a function of (seed, position, token id). The coupled acceptance rule needs the same
noise in every process, backend and device, and for any subset of token ids. So each number is a
hash, not a draw: two rounds of MurmurHash3's 32-bit finaliser over the token id, keyed per position
by SplitMix64 on the host. Only wrapping uint32 arithmetic is used, so numpy and MLX agree bit for
bit on the hash; their Gumbel transforms agree to float32 rounding.

Uniform numbers, for the rejection rule, are a function of (seed, stream, counters).
"""

from collections.abc import Iterable, Sequence
from typing import Any

_MASK64 = (1 << 64) - 1

DRAFT = 0xD6A5_9F1C_3B27_E84D
ACCEPT = 0xA91E_64B7_0FD3_582B
BONUS = 0xB37C_E20A_95F8_416D
"""Streams of the rejection rule; their numbers are mutually independent."""

# The largest float32 below 1: log1p(-1) would be minus infinity.
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def _splitmix64(x: int) -> int:
    """Apply one step of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix(xp: Any, x: Any) -> Any:
    """Apply MurmurHash3's fmix32 to a uint32 array."""
    x = x ^ (x >> xp.array(16, dtype=xp.uint32))
    x = x * xp.array(0x85EBCA6B, dtype=xp.uint32)
    x = x ^ (x >> xp.array(13, dtype=xp.uint32))
    x = x * xp.array(0xC2B2AE35, dtype=xp.uint32)
    return x ^ (x >> xp.array(16, dtype=xp.uint32))


def hash_bits(xp: Any, seed: int, positions: Sequence[int], ids: Any) -> Any:
    """Return 32 uniform bits per (position, token).

    Args:
        xp: the array library, `numpy` or `mlx.core`.
        seed: any non-negative integer below 2**64.
        positions: [rows] absolute positions of the tokens to be chosen.
        ids: [rows, n] or [1, n] uint32 token ids.

    Returns:
        [rows, n] uint32.
    """
    low, high = position_keys(seed, positions)
    return hash_with_keys(
        xp, xp.array(low, dtype=xp.uint32)[:, None], xp.array(high, dtype=xp.uint32)[:, None], ids
    )


def position_keys(seed: int, positions: Iterable[int]) -> tuple[list[int], list[int]]:
    """Return the keys of the hash at each position: the lower and the upper 32 bits."""
    begin = _splitmix64(seed)
    keys = [_splitmix64(begin ^ position) for position in positions]
    return [key & 0xFFFFFFFF for key in keys], [key >> 32 for key in keys]


def hash_with_keys(xp: Any, low: Any, high: Any, ids: Any) -> Any:
    """Return the bits of `hash_bits` for uint32 keys [rows, 1]."""
    return _mix(xp, _mix(xp, ids ^ low) + high)


def gumbel_from_bits(xp: Any, bits: Any) -> Any:
    """Convert 32 uniform bits to standard Gumbel variates: small integers give large values.

    The upper tail, which decides the argmax, thus has float32's relative precision.
    """
    uniform = (bits.astype(xp.float32) + 0.5) * 2.0**-32
    return -xp.log(-xp.log1p(-xp.minimum(uniform, _LARGEST_UNIFORM)))


def gumbel(xp: Any, seed: int, positions: Sequence[int], ids: Any) -> Any:
    """Return [rows, n] float32 standard Gumbel noise; arguments as for `hash_bits`."""
    return gumbel_from_bits(xp, hash_bits(xp, seed, positions, ids))


def uniform(seed: int, stream: int, *counters: int) -> float:
    """Return a number of the open interval (0, 1), on the host, with 52 random bits."""
    key = _splitmix64(_splitmix64(seed) ^ stream)
    for counter in counters:
        key = _splitmix64(key ^ counter)
    return ((key >> 12) + 0.5) * 2.0**-52
