"""Recurrent layers in a pass that several sequences share: each row goes on from its own state.

To the layers around them the rows of all sequences are one matrix. A convolution and a
recurrence are computed sequence by sequence, in the shapes that each has alone; where
launches are dear, sequences with the same number of rows are one batch. The model is handed
`PackedArrays` in place of a cache; the hooks of `kv.replay` find the sequences' own states in
the `SharedPass` that is in work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import mlx.core as mx
import numpy as np

from services.kv.recording import Recording, Recurrence

Recur = Callable[[dict[str, Any], bool], tuple[mx.array, mx.array, Callable[[int], mx.array]]]
"""(arguments of a recurrence, whether it is recorded) -> its output, its state after the last
row, and a function that gives the state after the first rows."""


@dataclass(frozen=True)
class PackedState:
    """A recurrence's state of each sequence, [1, ...]; None where there is none yet."""

    states: list[mx.array | None]


class PackedArrays:
    """One layer's recurrent caches of all sequences in a row; what mlx-lm takes for one cache.

    Args:
        caches: mlx-lm's own, in the order of the row.
        sources: of each array the id of its convolution, or None for a recurrence's state.
    """

    lengths = None
    left_padding = None

    def __init__(self, caches: Sequence[Any], sources: Sequence[int | None]) -> None:
        self._caches, self._sources = caches, sources

    def __getitem__(self, index: int) -> mx.array | PackedState | None:
        """The states; of a convolution only one window, which is not looked at."""
        arrays = [cache[index] for cache in self._caches]
        if self._sources[index] is None:
            return PackedState(arrays)
        return next((array for array in arrays if array is not None), None)

    def __setitem__(self, index: int, value: Any) -> None:
        """Give each sequence its state; windows were stored when they were convolved."""
        if self._sources[index] is not None:
            return
        if not isinstance(value, PackedState):
            raise TypeError("a recurrence did not keep its sequences apart")
        for cache, state in zip(self._caches, value.states, strict=True):
            cache[index] = state

    def make_mask(self, n: int, **_: Any) -> None:
        """None: all rows are tokens."""
        del n

    def advance(self, count: int) -> None:
        """Nothing: there is no padding."""


class SharedPass:
    """A pass over rows of several sequences, laid end to end; in work while it is entered.

    Args:
        counts: rows of each sequence.
        recordings: of each sequence's own rows, None where they need none.
        in_batches: whether sequences with the same number of rows are computed as a batch.
    """

    current: "SharedPass | None" = None

    def __init__(
        self, counts: Sequence[int], recordings: Sequence[Recording | None], *, in_batches: bool
    ) -> None:
        ends = [int(end) for end in np.cumsum(counts)]
        self._total = ends[-1]
        self._rows = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self._recordings = recordings
        self.keeps_steps = any(one is not None and one.keeps_steps for one in recordings)
        """See `Recording`."""
        parts = range(len(counts))
        self._groups = [[part] for part in parts]
        if in_batches:
            self._groups = [[p for p in parts if counts[p] == n] for n in sorted(set(counts))]
        self._windows: dict[int, tuple[Sequence[Any], int]] = {}
        """By convolution: the caches that hold its windows, and which of their arrays it is."""

    def __enter__(self) -> None:
        """Be the pass in work."""
        SharedPass.current = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The model is through."""
        SharedPass.current = None

    def pack(self, caches: Sequence[Any], sources: Sequence[int | None]) -> PackedArrays:
        """One layer's caches of all sequences; arguments as for `PackedArrays`."""
        for index, source in enumerate(sources):
            if source is not None:
                self._windows[source] = (caches, index)
        return PackedArrays(caches, sources)

    def convolve(
        self, convolution: int, x: mx.array, run: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """[1, window + rows, channels] -> [1, rows, channels]; every row has its own window."""
        caches, index = self._windows[convolution]
        kept = x.shape[1] - self._total
        inputs = []
        for cache, rows, recording in zip(caches, self._rows, self._recordings, strict=True):
            window = cache[index]
            if window is None:
                window = mx.zeros((1, kept, x.shape[2]), x.dtype)
            own = x[:, kept + rows.start : kept + rows.stop]
            given = mx.concatenate([window, own], axis=1)
            cache[index] = mx.contiguous(given[:, -kept:])
            if recording is not None:
                recording.convolved[convolution] = given
            inputs.append(given)
        outs: list[Any] = [None] * len(inputs)
        for group in self._groups:
            found = run(_stack([inputs[part] for part in group]))
            for place, part in enumerate(group):
                outs[part] = _one(found, place, group)
        return mx.concatenate(outs, axis=1)

    def recur(
        self, run: Recur, given: dict[str, Any], timed: Sequence[str]
    ) -> tuple[mx.array, PackedState]:
        """A recurrence whose arguments named in `timed` are rows of all sequences."""
        states = given["state"].states
        outs: list[Any] = [None] * len(states)
        news: list[Any] = [None] * len(states)
        for group in self._groups_with(states):
            own = {  # laid out as if they had come alone
                name: mx.contiguous(_stack([given[name][:, self._rows[part]] for part in group]))
                for name in timed
            }
            before = states[group[0]] if len(group) == 1 else _stack([states[p] for p in group])
            recorded = any(self._recordings[part] is not None for part in group)
            out, after, state_after = run(given | own | {"state": before}, recorded)
            for place, part in enumerate(group):
                outs[part], news[part] = _one(out, place, group), _one(after, place, group)
                recording = self._recordings[part]
                if recording is not None:
                    state_of = _of_one(state_after, place, group)
                    recording.calls.append(Recurrence(news[part], state_of))
        return mx.concatenate(outs, axis=1), PackedState(news)

    def _groups_with(self, states: Sequence[mx.array | None]) -> list[list[int]]:
        """The groups; a sequence that has no state yet is one of its own."""
        new = [part for part, state in enumerate(states) if state is None]
        old = [[part for part in group if part not in new] for group in self._groups]
        return [*(group for group in old if group), *([part] for part in new)]


def _stack(arrays: list[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def _one(array: mx.array, place: int, group: Sequence[int]) -> mx.array:
    return array if len(group) == 1 else array[place : place + 1]


def _of_one(
    state_after: Callable[[int], mx.array], place: int, group: Sequence[int]
) -> Callable[[int], mx.array]:
    return lambda rows: _one(state_after(rows), place, group)
