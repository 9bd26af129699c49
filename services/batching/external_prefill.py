"""A prompt's keys and values from another device, put into the target's cache.

Another device may prefill faster than the one that decodes, or leave it free meanwhile. Whether
it does is measured when the verifier starts, per length; which way a prompt goes then depends on
its length alone.
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
from services.kv.slots import round_to_bucket
from services.kv.state import SequenceState

_log = logging.getLogger(__name__)

_CLEARLY = 4.0
"""Times as long: lost, even if that was a first run, which warms up."""

_BUDGET_S = 15.0
"""For measuring, while the stack waits; the reference runtime would take minutes."""

Computed = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Keys and values of some tokens, [layers, kv_heads, tokens, head_dim] each."""


class PrefillSource(Protocol):
    """Computes keys and values of prompts; raises ModelError if it cannot any more."""

    @property
    def slots(self) -> int:
        """Longest prompt that it takes."""
        ...

    def pieces(self, tokens: Tokens) -> Generator[Computed]:
        """The keys and values of these tokens, piece by piece; may be abandoned between two."""
        ...


class KVInjection:
    """Memory of the target's cache, into which rows are written while they are computed.

    numpy writes where MLX will read, in the target's own type, so that nothing is left to
    convert or to copy when the prompt ends.
    """

    def __init__(self, length: int, dtype: mx.Dtype) -> None:
        """For a prompt of so many tokens; the first rows tell how many layers and heads."""
        self._length = length
        self._dtype = dtype
        # The buffer protocol knows no bfloat16: its bits are written.
        self._stored = mx.uint16 if dtype == mx.bfloat16 else dtype
        self._buffers: list[tuple[mx.array, mx.array]] = []
        self._views: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        self._filled = 0

    def write(self, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """The next tokens' rows, [layers, heads, tokens, size] each."""
        if not self._buffers:
            self._allocate(keys.shape)
        rows = slice(self._filled, self._filled + keys.shape[2])
        keys, values = self._convert(keys), self._convert(values)
        for layer, (key_slots, value_slots) in enumerate(self._views):
            key_slots[0, :, rows] = keys[layer]
            value_slots[0, :, rows] = values[layer]
        self._filled = rows.stop

    def hand_over(self, state: SequenceState) -> None:
        """Make this the beginning of an empty state."""
        self._views = []  # MLX writes in place only what nobody else holds
        buffers, self._buffers = self._buffers, []
        if self._stored != self._dtype:
            buffers = [(keys.view(self._dtype), values.view(self._dtype))
                       for keys, values in buffers]  # fmt: skip
        state.take(buffers, self._filled)

    def _convert(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """All layers at once: numpy converts slowly while it scatters."""
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
    """The bits of finite numbers rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(
        np.uint16
    )
    return rounded


Times = dict[int, tuple[float, float]]
"""Length of a prompt -> milliseconds (here, on the other device)."""


class PrefillChoice:
    """For which prompts the other way is the faster one."""

    def __init__(self, longest: int, times: Times) -> None:
        """From what was measured, in rising order; longer prompts than `longest` do not fit."""
        self._longest = min(longest, max(times))
        self._lengths = [0, *times]
        self._here = [0.0, *(own for own, _ in times.values())]
        self._there = [other for _, other in times.values()]

    def prefers_external(self, length: int) -> bool:
        """Return whether a prompt of this length should be computed on the other device.

        Between two measured lengths the other way, which computes whole chunks, is taken to need
        what it needed for the longer one, and the target's own way its share: if that errs, it
        errs towards the target's own.
        """
        if not 0 < length <= self._longest:
            return False
        there = self._there[bisect_left(self._lengths, length) - 1]
        return there < float(np.interp(length, self._lengths, self._here))


class ExternalPrefill:
    """Prompts of one target that another device computes."""

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
        """What was measured."""
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
        """Fill an empty state with a prompt, if that is the better way; notes it in `held`."""
        if state.length or not self._choice.prefers_external(len(tokens)):
            return
        landing = KVInjection(len(tokens), self._dtype)
        for keys, values in self._other.pieces(tokens):
            landing.write(keys, values)
            yield
        landing.hand_over(state)
        held += tokens

    def _here(self, length: int) -> None:
        state = self._make_state()
        state.append(length, whole=True)
        self._module(mx.ones((1, length), mx.int32), cache=state.caches)
        state.evaluate()

    def _there(self, length: int) -> None:
        state = self._make_state()
        landing = KVInjection(length, self._dtype)
        for keys, values in self._other.pieces([1] * length):
            landing.write(keys, values)
        landing.hand_over(state)
        state.evaluate()


def kv_dtype(module: Any, make_state: Callable[[], SequenceState]) -> mx.Dtype:
    """The type of the target's own keys: a forward of one token tells."""
    state = make_state()
    state.append(1, whole=True)
    module(mx.zeros((1, 1), mx.int32), cache=state.caches)
    keys: mx.array | None = state.caches[0].keys
    if keys is None:
        raise ValueError("the target stores no keys")
    return keys.dtype


def always(longest: int) -> PrefillChoice:
    """Every prompt that fits goes to the other device; for tests and comparisons."""
    return PrefillChoice(longest, {longest: (1.0, 0.0)})


def measure_times(
    here: Callable[[int], None],
    there: Callable[[int], None],
    longest: int,
    budget_s: float = _BUDGET_S,
) -> Times:
    """Time both ways at doubling lengths; the better of two runs counts.

    Where the other way takes `_CLEARLY` times as long as the target's own, one run of each will
    do; not where it seems to win, as the target's own first run may have compiled its kernels.
    Once the budget is spent, or the next length would overspend it, longer prompts stay here.
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
