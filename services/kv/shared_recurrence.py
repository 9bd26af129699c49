"""Recurrent layers in a pass shared by several sequences, each continuing from its own state.

The layers around them see the rows of all sequences as one matrix. Convolutions and recurrences are
computed sequence by sequence, in the shapes each has alone; where launches are expensive, sequences
with equal numbers of rows form one batch. The model gets `PackedArrays` in place of a cache; the
hooks of `kv.replay` find the sequences' states in the current `SharedRecurrence`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import mlx.core as mx

from services.engine.batch import Span, slice_rows
from services.kv.recording import Recording, Recurrence

Recur = Callable[[dict[str, Any], bool], tuple[mx.array, mx.array, Callable[[int], mx.array]]]
"""(arguments of a recurrence, record it) -> output, state after the last row, state after n rows.
"""


@dataclass(frozen=True)
class PackedState:
    """A recurrence's state of each sequence, [1, ...]; None for sequences without a state."""

    states: list[mx.array | None]


class PackedArrays:
    """One layer's recurrent caches of all sequences in a row, in the form of one mlx-lm cache.

    Args:
        caches: mlx-lm's own, in the order of the row.
        sources: per array the id of its convolution, or None for a recurrence's state.
    """

    lengths = None
    left_padding = None

    def __init__(self, caches: Sequence[Any], sources: Sequence[int | None]) -> None:
        self._caches, self._sources = caches, sources

    def __getitem__(self, index: int) -> mx.array | PackedState | None:
        """Return the states; for a convolution just one window, whose contents are not used."""
        arrays = [cache[index] for cache in self._caches]
        if self._sources[index] is None:
            return PackedState(arrays)
        return next((array for array in arrays if array is not None), None)

    def __setitem__(self, index: int, value: Any) -> None:
        """Set each sequence's state; windows were stored by the convolution."""
        if self._sources[index] is not None:
            return
        if not isinstance(value, PackedState):
            raise TypeError("a recurrence did not keep its sequences apart")
        for cache, state in zip(self._caches, value.states, strict=True):
            cache[index] = state

    def make_mask(self, n: int, **_: Any) -> None:
        """Return None: all rows are tokens."""
        del n

    def advance(self, count: int) -> None:
        """Do nothing: there is no padding."""


class SharedRecurrence:
    """The recurrences of a pass over several sequences; current while it is entered.

    Args:
        spans: the rows of each sequence.
        recordings: one per sequence, None where no recording is needed.
        in_batches: compute sequences with equal numbers of rows as a batch.
    """

    current: "SharedRecurrence | None" = None

    def __init__(
        self, spans: Sequence[Span], recordings: Sequence[Recording | None], *, in_batches: bool
    ) -> None:
        self._rows, counts = slice_rows(spans), [span.count for span in spans]
        self._total = sum(counts)
        self._recordings = recordings
        self.keeps_steps = any(one is not None and one.keeps_steps for one in recordings)
        """See `Recording`."""
        parts = range(len(counts))
        self._groups = [[part] for part in parts]
        if in_batches:
            self._groups = [[p for p in parts if counts[p] == n] for n in sorted(set(counts))]
        self._windows: dict[int, tuple[Sequence[Any], int]] = {}
        """Convolution -> the caches that hold its windows, and the index of the window in them."""

    def __enter__(self) -> None:
        """Become the current pass."""
        SharedRecurrence.current = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the current pass."""
        SharedRecurrence.current = None

    def pack(self, caches: Sequence[Any], sources: Sequence[int | None]) -> PackedArrays:
        """Pack one layer's caches of all sequences; arguments as for `PackedArrays`."""
        for index, source in enumerate(sources):
            if source is not None:
                self._windows[source] = (caches, index)
        return PackedArrays(caches, sources)

    def convolve(
        self, convolution: int, x: mx.array, run: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """Convolve [1, window + rows, channels] to [1, rows, channels], a window per row."""
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
            out = run(_stack([inputs[part] for part in group]))
            for place, part in enumerate(group):
                outs[part] = _one(out, place, group)
        return mx.concatenate(outs, axis=1)

    def recur(
        self, run: Recur, given: dict[str, Any], timed: Sequence[str]
    ) -> tuple[mx.array, PackedState]:
        """Compute a recurrence whose arguments named in `timed` have rows of all sequences."""
        states = given["state"].states
        outs: list[Any] = [None] * len(states)
        news: list[Any] = [None] * len(states)
        for group in self._groups_with(states):
            own = {  # contiguous, as when computed alone
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
        """Return the groups; a sequence without a state forms its own."""
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
