"""A prompt's keys and values from elsewhere, put into the target's cache.

Another device may prefill faster than the one that decodes, or leave it free meanwhile. Whether
it does is measured when the verifier starts, per length; so which way a prompt goes depends on
its length alone, and a verifier started again goes the same way.
"""

import logging
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import mlx.core as mx
import numpy.typing as npt

from protocol.messages import Tokens
from services.kv import KVStore

_log = logging.getLogger(__name__)

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


class PromptsElsewhere:
    """Prompts of one target that another device computes."""

    def __init__(
        self,
        module: Any,
        windows: list[int | None],
        other: Elsewhere,
        *,
        whenever_it_fits: bool,
    ) -> None:
        self._module = module
        self._windows = windows
        self._other = other
        self._dtype = kv_dtype(module, windows)
        if whenever_it_fits:
            self._choice = always(other.slots)
            return
        self._choice, times = measured(self._here, self._there, other.slots)
        for length, (own, elsewhere) in times.items():
            _log.info("prefill of %d tokens: %.1f ms here, %.1f elsewhere", length, own, elsewhere)

    def fill(self, store: KVStore, held: Tokens, tokens: Tokens) -> Generator[None]:
        """Fill an empty store with a prompt, if that is the better way; notes it in `held`."""
        if store.length or not self._choice.elsewhere(len(tokens)):
            return
        computed = yield from self._other.pieces(tokens)
        inject(store, computed, self._dtype)
        store.evaluate()
        held += tokens

    def _here(self, length: int) -> None:
        store = KVStore(self._windows, bucketed=False)
        store.chain(length)
        self._module(mx.ones((1, length), mx.int32), cache=store.caches)
        store.evaluate()

    def _there(self, length: int) -> None:
        store = KVStore(self._windows, bucketed=False)
        pieces = self._other.pieces([1] * length)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                inject(store, end.value, self._dtype)
                store.evaluate()
                return


def kv_dtype(module: Any, windows: list[int | None]) -> mx.Dtype:
    """The type of the target's own keys: a forward of one token tells."""
    store = KVStore(windows, bucketed=False)
    store.chain(1)
    module(mx.zeros((1, 1), mx.int32), cache=store.caches)
    keys = store.caches[0].keys
    if keys is None:
        raise ValueError("the target stores no keys")
    return keys.dtype


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
