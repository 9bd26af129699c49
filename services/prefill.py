"""A prompt's keys and values from elsewhere, put into the target's cache.

Another device may prefill faster than the one that decodes, or leave it free meanwhile. Whether
it does is measured when the verifier starts, per length; so which way a prompt goes depends on
its length alone, and a verifier started again goes the same way.
"""

import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import mlx.core as mx
import numpy.typing as npt

from protocol.messages import Tokens
from services.kv import KVStore

Computed = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Keys and values of a prompt, [layers, kv_heads, tokens, head_dim] each."""


class Elsewhere(Protocol):
    """Computes keys and values of prompts; raises ModelError if it cannot any more."""

    @property
    def slots(self) -> int:
        """Longest prompt that it takes."""
        ...

    def pieces(self, tokens: Tokens) -> Generator[None, None, Computed]:
        """The keys and values of these tokens; yields where it may be interrupted."""
        ...


def inject(store: KVStore, computed: Computed, dtype: mx.Dtype) -> None:
    """Append tokens whose keys and values were computed elsewhere."""
    keys, values = (mx.array(array) for array in computed)
    store.append(keys.astype(dtype), values.astype(dtype))


class Choice:
    """For which prompts the other way is the faster one."""

    def __init__(self, longest: int, wins: list[tuple[int, bool]]) -> None:
        self._longest = longest
        self._wins = sorted(wins)

    def elsewhere(self, length: int) -> bool:
        """Whether a prompt of this length should be computed elsewhere.

        Between two measured lengths the longer one's verdict holds.
        """
        if not 0 < length <= self._longest:
            return False
        return next((wins for measured, wins in self._wins if measured >= length), False)


def always(longest: int) -> Choice:
    """Every prompt that fits goes elsewhere; for tests and comparisons."""
    return Choice(longest, [(longest, True)])


def measured(
    here: Callable[[int], None], there: Callable[[int], None], longest: int
) -> tuple[Choice, dict[int, tuple[float, float]]]:
    """Time both ways at doubling lengths; the better of two runs counts.

    Returns:
        The choice, and per length the milliseconds (here, elsewhere).
    """
    lengths = [length for length in (64, 128, 256, 512, 1024, 2048) if length < longest]
    times = {
        length: (_best_ms(here, length), _best_ms(there, length)) for length in [*lengths, longest]
    }
    wins = [(length, other < own) for length, (own, other) in times.items()]
    return Choice(longest, wins), times


def _best_ms(run: Callable[[int], None], length: int) -> float:
    taken = []
    for _ in range(2):
        started = time.perf_counter()
        run(length)
        taken.append(1e3 * (time.perf_counter() - started))
    return min(taken)
