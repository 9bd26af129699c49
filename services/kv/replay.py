"""Recurrent layers computed again for the rows of a chain that stand.

While a chain is verified, the inputs of every recurrence and of every short convolution are
recorded. If a part of the chain is rejected, the recurrence runs once more over the rows that
stand, from where it began, without the projections around it, and the convolution's window is
cut out of its recorded input. The recurrence walks the tokens in order, so that this gives the
state that these tokens alone would have left.

Mamba-2 in mlx-lm takes another way for several tokens at once than for one, and rounds
differently. A chain is therefore walked token by token, as plain decoding does; the states in
between are kept, and the right one is simply taken.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.ssm import ssm_update

_TIMED = {
    "gated_delta_update": ("q", "k", "v", "a", "b"),
    "ssm_update": ("hidden_states", "B", "C", "dt"),
}
"""Arguments that have a row per token, on axis 1."""


@dataclass
class _Call:
    """One recurrence over the rows of a pass."""

    state: mx.array
    """After the last row."""
    state_after: Callable[[int], mx.array]
    """After the first rows."""


@dataclass
class Recording:
    """What the layers of one sequence were given in one pass."""

    convolved: dict[int, mx.array] = field(default_factory=dict)
    """By convolution (its id): its input, [1, window + rows, channels]."""
    calls: list[_Call] = field(default_factory=list)

    def stop(self) -> None:
        """Record no more."""
        if _Tape.current is self:
            _Tape.current = None

    def call_of(self, state: Any) -> _Call | None:
        """The recurrence that left this state."""
        return next((call for call in self.calls if call.state is state), None)


class _Tape:
    """Where recurrences of this process are recorded now; MLX has one thread here."""

    current: Recording | None = None


def start_recording() -> Recording:
    """Record the pass that comes now."""
    _Tape.current = Recording()
    return _Tape.current


class RecordingConv1d(nn.Conv1d):  # type: ignore[misc]
    """A convolution whose input is recorded."""

    def __call__(self, x: mx.array) -> mx.array:
        """[1, window + rows, channels] -> [1, rows, channels]."""
        if _Tape.current is not None:
            _Tape.current.convolved[id(self)] = x
        result: mx.array = super().__call__(x)
        return result


def _record_gated_delta(update: Callable[..., Any]) -> Callable[..., Any]:
    """`gated_delta_update` that notes its arguments."""
    signature = inspect.signature(update)

    @wraps(update)
    def record(*args: Any, **options: Any) -> Any:
        out, state = update(*args, **options)
        if _Tape.current is not None:
            given = signature.bind(*args, **options).arguments

            def state_after(rows: int) -> mx.array:
                found: mx.array = update(**_first_rows(update, given, slice(rows)))[1]
                return found

            _Tape.current.calls.append(_Call(state, state_after))
        return out, state

    return record


def _walk_ssm(update: Callable[..., Any]) -> Callable[..., Any]:
    """`ssm_update` that takes the rows of a recorded pass one by one."""
    signature = inspect.signature(update)

    @wraps(update)
    def walk(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        rows = given["hidden_states"].shape[1]
        if _Tape.current is None or given.get("mask") is not None:
            return update(*args, **options)
        state, outs, states = given.get("state"), [], list[mx.array]()
        for row in range(rows):
            one = _first_rows(update, given, slice(row, row + 1)) | {"state": state}
            out, state = update(**one)
            outs.append(out)
            states.append(state)
        _Tape.current.calls.append(_Call(states[-1], lambda kept: states[kept - 1]))
        return mx.concatenate(outs, axis=1), states[-1]

    return walk


def _first_rows(update: Callable[..., Any], given: dict[str, Any], rows: slice) -> dict[str, Any]:
    timed = _TIMED[update.__name__]
    return {name: value[:, rows] if name in timed else value for name, value in given.items()}


_HOOKS = {
    gated_delta_update: _record_gated_delta(gated_delta_update),
    ssm_update: _walk_ssm(ssm_update),
}


def install_hooks(model: nn.Module) -> list[nn.Module]:
    """Let the model's recurrences and convolutions be recorded; returns the convolutions."""
    convolutions: list[nn.Module] = []
    homes = set()
    for _, module in model.named_modules():
        homes.add(type(module).__module__)
        if type(module) is nn.Conv1d:
            module.__class__ = RecordingConv1d
        if type(module) is RecordingConv1d:
            convolutions.append(module)
    for home in homes:
        names = vars(sys.modules[home])
        for original, hook in _HOOKS.items():
            if names.get(original.__name__) is original:
                names[original.__name__] = hook
    return convolutions


def has_known_recurrence(model: nn.Module, caches: Sequence[Any]) -> bool:
    """Whether the recurrent layers of a model, with these caches, are of a kind to be replayed."""
    modules = [module for _, module in model.named_modules()]
    names = {name for module in modules for name in vars(sys.modules[type(module).__module__])}
    if names & {original.__name__ for original in _HOOKS}:
        return True
    # A single array can be the window of a convolution.
    single = all(len(cache.cache) == 1 for cache in caches if type(cache) is ArraysCache)
    return single and any(isinstance(module, nn.Conv1d) for module in modules)


class ReplayPlan:
    """How each array of a model's recurrent caches is found again after a part of a pass."""

    def __init__(self, sources: list[list[int | None]]) -> None:
        """`sources`: per cache and array the id of a convolution, or None for a recurrence."""
        self._sources = sources

    def record(self) -> Recording:
        """A recording of the pass that comes now."""
        return start_recording()

    def rewind(self, caches: Sequence[Any], recording: Recording, keep: int) -> None:
        """Bring the caches to the first `keep` rows of the pass, of which there is at least one.

        Raises:
            ValueError: the pass did something else than the one that the plan was made from.
        """
        states = [cache for cache in caches if type(cache) is ArraysCache]
        for cache, sources in zip(states, self._sources, strict=True):
            for index, source in enumerate(sources):
                cache[index] = _rewound(cache[index], recording, source, keep)


def _rewound(array: mx.array, recording: Recording, source: int | None, keep: int) -> mx.array:
    if source is None:
        call = recording.call_of(array)
        if call is None:
            raise ValueError("a layer's state does not come from its recurrence")
        return call.state_after(keep)
    return mx.contiguous(recording.convolved[source][:, keep : keep + array.shape[1]])


def plan_replay(
    caches: Sequence[Any], recording: Recording, convolutions: Sequence[nn.Module], rows: int
) -> ReplayPlan | None:
    """The plan that explains what a recorded pass over `rows` rows left in the caches."""
    sources: list[list[int | None]] = []
    for cache in caches:
        if type(cache) is not ArraysCache:
            return None
        found: list[int | None] = []
        for array in cache.cache:
            if recording.call_of(array) is not None:
                found.append(None)
                continue
            source = _source_of(array, recording, convolutions, rows)
            if source is None:
                return None
            found.append(source)
        sources.append(found)
    return ReplayPlan(sources)


def _source_of(
    array: Any, recording: Recording, convolutions: Sequence[nn.Module], rows: int
) -> int | None:
    """The convolution whose window this array is."""
    if not isinstance(array, mx.array) or array.ndim != 3:
        return None
    for convolution in convolutions:
        given = recording.convolved.get(id(convolution))
        if given is None or given.shape[1] != rows + array.shape[1]:
            continue
        window = given[:, rows:]
        if window.shape == array.shape and bool(mx.array_equal(window, array)):
            return id(convolution)
    return None
