"""A prompt's keys and values from another device, injected into the target's cache.

Another device may prefill faster than the one that decodes, or leave it free meanwhile. This is
measured per length when the verifier starts; afterwards a prompt's route depends on its length
alone.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Generator
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.messages import Tokens
from services.engine.batch import round_to_bucket
from services.kv.cache import KVStore
from services.kv.state import SequenceState

_log = logging.getLogger(__name__)

_CLEARLY = 4.0
"""From this ratio of times on, the other device has lost, even if its first run was a warm-up."""

_BUDGET_S = 15.0
"""Limit on measuring, for which the stack waits: the reference runtime would take minutes."""

Computed = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Keys and values of consecutive tokens, [layers, kv_heads, tokens, head_dim] each."""


class PrefillSource(Protocol):
    """Computes keys and values of prompts; raises ModelError if it no longer can."""

    @property
    def slots(self) -> int:
        """The longest prompt that it takes, in tokens."""
        ...

    def pieces(self, tokens: Tokens) -> Generator[Computed]:
        """Yield the keys and values of these tokens in pieces; may be abandoned between two."""
        ...


class KVInjection:
    """Memory of the target's cache, into which rows are written as they are computed.

    numpy writes where MLX will read, in the target's own type, so that nothing is left to convert
    or copy when the prompt ends.
    """

    def __init__(self, length: int, dtype: mx.Dtype) -> None:
        """Prepare for a prompt of `length` tokens; the first rows set layers and heads."""
        self._length = length
        self._dtype = dtype
        # The buffer protocol has no bfloat16: its bits are written.
        self._stored = mx.uint16 if dtype == mx.bfloat16 else dtype
        self._buffers: list[tuple[mx.array, mx.array]] = []
        self._views: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        self._filled = 0

    def write(self, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Write the next tokens' rows, [layers, heads, tokens, size] each."""
        if not self._buffers:
            self._allocate(keys.shape)
        rows = slice(self._filled, self._filled + keys.shape[2])
        keys, values = self._convert(keys), self._convert(values)
        for layer, (key_slots, value_slots) in enumerate(self._views):
            key_slots[0, :, rows] = keys[layer]
            value_slots[0, :, rows] = values[layer]
        self._filled = rows.stop

    def hand_over(self, state: SequenceState) -> None:
        """Make this the start of an empty state."""
        self._views = []  # MLX writes in place only if no other reference exists
        buffers, self._buffers = self._buffers, []
        if self._stored != self._dtype:
            buffers = [(keys.view(self._dtype), values.view(self._dtype))
                       for keys, values in buffers]  # fmt: skip
        state.take(buffers, self._filled)

    def _convert(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Convert all layers at once: numpy converts slowly while it scatters."""
        if self._dtype == mx.bfloat16:
            return _bfloat16(rows)
        return rows.astype(np.float16 if self._dtype == mx.float16 else np.float32, copy=False)

    def _allocate(self, shape: tuple[int, ...]) -> None:
        layers, heads, _, size = shape
        slots = (1, heads, round_to_bucket(self._length), size)
        self._buffers = [
            (mx.zeros(slots, self._stored), mx.zeros(slots, self._stored)) for _ in range(layers)
        ]
        mx.eval(self._buffers)
        self._views = [
            (np.array(keys, copy=False), np.array(values, copy=False))
            for keys, values in self._buffers
        ]


def _bfloat16(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Return the bits of finite numbers rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(
        np.uint16
    )
    return rounded


Times = dict[int, tuple[float, float]]
"""Length of a prompt -> milliseconds (here, on the other device)."""


class PrefillChoice:
    """The prompts for which the other device is faster."""

    def __init__(self, longest: int, times: Times) -> None:
        """Store measurements in ascending order; prompts longer than `longest` do not fit."""
        self._longest = min(longest, max(times))
        self._lengths = [0, *times]
        self._here = [0.0, *(own for own, _ in times.values())]
        self._there = [other for _, other in times.values()]

    def prefers_external(self, length: int) -> bool:
        """Return True if a prompt of this length should be computed on the other device.

        Between two measured lengths the other device, which computes whole chunks, is assumed to
        take as long as for the longer one, and the target a linear share: errors favour the target.
        """
        if not 0 < length <= self._longest:
            return False
        there = self._there[bisect_left(self._lengths, length) - 1]
        return there < float(np.interp(length, self._lengths, self._here))


class ExternalPrefill:
    """Prefill of one target's prompts on another device, where that is faster."""

    def __init__(
        self,
        module: Any,
        make_state: Callable[[], SequenceState],
        other: PrefillSource,
        *,
        whenever_it_fits: bool,
        budget_s: float = _BUDGET_S,
    ) -> None:
        self._module = module
        self._make_state = make_state
        self._other = other
        self._dtype = kv_dtype(module, make_state)
        self.times: Times = {}
        """The measurements."""
        if whenever_it_fits:
            self._choice = always(other.slots)
            return
        self.times = measure_times(self._here, self._there, other.slots, budget_s)
        self._choice = PrefillChoice(other.slots, self.times)
        for length, (own, external) in self.times.items():
            _log.info(
                "prefill of %d tokens: %.1f ms here, %.1f on the other device",
                length,
                own,
                external,
            )

    def fill(self, state: SequenceState, held: Tokens, tokens: Tokens) -> Generator[None]:
        """Fill an empty state with a prompt if that is faster; appends its tokens to `held`."""
        if state.length or not self._choice.prefers_external(len(tokens)):
            return
        injection = KVInjection(len(tokens), self._dtype)
        for keys, values in self._other.pieces(tokens):
            injection.write(keys, values)
            yield
        injection.hand_over(state)
        held += tokens

    def _here(self, length: int) -> None:
        state = self._make_state()
        state.append(length, whole=True)
        self._module(mx.ones((1, length), mx.int32), cache=state.caches)
        state.evaluate()

    def _there(self, length: int) -> None:
        state = self._make_state()
        injection = KVInjection(length, self._dtype)
        for keys, values in self._other.pieces([1] * length):
            injection.write(keys, values)
        injection.hand_over(state)
        state.evaluate()


def kv_dtype(module: Any, make_state: Callable[[], SequenceState]) -> mx.Dtype:
    """Return the type of the target's own keys, from a forward pass of one token."""
    state = make_state()
    state.append(1, whole=True)
    module(mx.zeros((1, 1), mx.int32), cache=state.caches)
    if isinstance(state, KVStore):
        state.gather()
    keys: mx.array | None = state.caches[0].keys
    if keys is None:
        raise ValueError("the target stores no keys")
    return keys.dtype


def always(longest: int) -> PrefillChoice:
    """Send every prompt that fits to the other device; for tests and comparisons."""
    return PrefillChoice(longest, {longest: (1.0, 0.0)})


def measure_times(
    here: Callable[[int], None],
    there: Callable[[int], None],
    longest: int,
    budget_s: float = _BUDGET_S,
) -> Times:
    """Time both devices at doubling lengths; the better of two runs counts.

    Where the other device takes `_CLEARLY` times as long as the target, one run of each suffices;
    not where it seems to win, as the target's first run may have compiled its kernels. Once the
    budget is spent, or the next length would exceed it, longer prompts stay here.
    """
    lengths = [length for length in (64, 128, 256, 512, 1024, 2048) if length < longest]
    times: Times = {}
    began = time.perf_counter()
    for length in [*lengths, longest]:
        started = time.perf_counter()
        times[length] = _both_ms(here, there, length)
        ended = time.perf_counter()
        # Twice the tokens take about twice as long.
        if ended - began + 2 * (ended - started) > budget_s:
            break
    return times


def _both_ms(
    here: Callable[[int], None], there: Callable[[int], None], length: int
) -> tuple[float, float]:
    own, other = _ms(here, length), _ms(there, length)
    if other < _CLEARLY * own:
        own, other = min(own, _ms(here, length)), min(other, _ms(there, length))
    return own, other


def _ms(run: Callable[[int], None], length: int) -> float:
    started = time.perf_counter()
    run(length)
    return 1e3 * (time.perf_counter() - started)
