"""Recompute recurrent layers for the accepted rows of a chain.

While a chain is verified, the inputs of every recurrence and every short convolution are recorded.
If part of the chain is rejected, the recurrence runs once more from its initial state over the
accepted rows, without the projections around it, and the convolution's window is cut out of its
recorded input. The recurrence processes tokens in order, so the result is the state that these
tokens alone would have left.

Without its own kernel (on a CPU and on CUDA) mlx-lm computes a gated delta net row by row. The
states between the rows are then kept as they are computed, and nothing is recomputed.

For several tokens at once, mlx-lm computes Mamba-2 in another way than for one, with other
rounding. A chain is therefore processed token by token, as in plain decoding; the states between
the tokens are kept, and the right one is picked.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.ssm import ssm_update

from services.kv.recording import Recording, Recurrence, Tape
from services.kv.shared_recurrence import Recur, SharedRecurrence
from services.kv.state import PassSize
from services.mlx.patches import Patch, install

_TIMED = {
    "gated_delta_update": ("q", "k", "v", "a", "b"),
    "ssm_update": ("hidden_states", "B", "C", "dt"),
}
"""Arguments that have one row per token, on axis 1."""
_MOST_STEPS = 8
"""Longest pass, in rows, whose states between rows are kept: each is as large as the layer's state.
"""
_ANY = 1 << 30
_UNKNOWN, _STEPPED, _WALKED = 24, 2, 1
"""Upper bounds on the arrays, as large as a layer's state, that are alive per token of a pass: in a
recurrence of unknown kind (Jamba's takes 19), in a gated delta net without a kernel, and in
Mamba-2.
"""
_UNKNOWN_HELD = 60
"""The bound for the unknown kind where arrays stay alive until all layers are computed, relative to
the states of all layers: Jamba's took 30 to 38 on an H200 (2026-11-26), and over 40 on a busy one.
"""


class RecordingConv1d(nn.Conv1d):  # type: ignore[misc]
    """A convolution whose input is recorded."""

    def __call__(self, x: mx.array) -> mx.array:
        """[1, window + rows, channels] -> [1, rows, channels]."""
        if SharedRecurrence.current is not None:
            return SharedRecurrence.current.convolve(id(self), x, super().__call__)
        if Tape.current is not None:
            Tape.current.convolved[id(self)] = x
        result: mx.array = super().__call__(x)
        return result


def _recording(_: type) -> type:
    return RecordingConv1d


def _hook(update: Callable[..., Any], recur: Callable[..., Any]) -> Callable[..., Any]:
    """Return `update` with recorded or shared passes computed by `recur`."""
    signature = inspect.signature(update)
    run: Recur = partial(recur, update)

    @wraps(update)
    def compute(*args: Any, **options: Any) -> Any:
        if Tape.current is None and SharedRecurrence.current is None:
            return update(*args, **options)
        given = signature.bind(*args, **options).arguments
        if SharedRecurrence.current is not None:
            return SharedRecurrence.current.recur(run, given, _TIMED[update.__name__])
        out, state, state_after = run(given, True)  # noqa: FBT003  # positional in `Recur`
        if Tape.current is not None:
            Tape.current.calls.append(Recurrence(state, state_after))
        return out, state

    return compute


def _replay_later(
    update: Callable[..., Any],
    given: dict[str, Any],
    recorded: bool,  # noqa: FBT001  # `Recur`
) -> tuple[mx.array, mx.array, Callable[[int], mx.array]]:
    """Compute all rows at once, and the first ones again on demand.

    The states after each row are used instead if they were kept.
    """
    rows = given[_TIMED[update.__name__][0]].shape[1]
    keeps = recorded and rows <= _MOST_STEPS and _keeps_steps()
    steps: list[mx.array] = []
    Tape.steps = steps if keeps else None
    try:
        out, state = update(**given)
    finally:
        Tape.steps = None
    if steps and Tape.current is not None:
        Tape.current.most_kept = max(_MOST_STEPS, Tape.current.most_kept)

    def state_after(kept: int) -> mx.array:
        if len(steps) == rows:
            return steps[kept - 1]
        found: mx.array = update(**_first_rows(update, given, slice(kept)))[1]
        return found

    return out, state, state_after


def _keeps_steps() -> bool:
    """Return True if a recording of the current pass keeps the states between rows."""
    shared = SharedRecurrence.current
    if shared is not None:
        return shared.keeps_steps
    return Tape.current is not None and Tape.current.keeps_steps


def _note_steps(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap mlx-lm's step of a gated delta net over one row to keep its state."""

    @wraps(step)
    def compute(*args: Any, **options: Any) -> Any:
        found = step(*args, **options)
        if Tape.steps is not None:
            Tape.steps.append(found[1])
        return found

    return compute


def _walk(
    update: Callable[..., Any],
    given: dict[str, Any],
    recorded: bool,  # noqa: FBT001  # `Recur`
) -> tuple[mx.array, mx.array, Callable[[int], mx.array]]:
    """Compute the rows of a recorded pass one by one, as plain decoding does."""
    rows = given["hidden_states"].shape[1]
    if not recorded or given.get("mask") is not None:
        return _replay_later(update, given, recorded)
    state, outs, states = given.get("state"), [], list[mx.array]()
    for row in range(rows):
        one = _first_rows(update, given, slice(row, row + 1)) | {"state": state}
        out, state = update(**one)
        outs.append(out)
        states.append(state)
    if Tape.current is not None:
        Tape.current.most_kept = _ANY
    return mx.concatenate(outs, axis=1), states[-1], lambda kept: states[kept - 1]


def _first_rows(update: Callable[..., Any], given: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Return these rows of the arguments in contiguous arrays.

    MLX multiplies strided rows by other kernels, which round differently.
    """
    timed = _TIMED[update.__name__]
    return {
        name: mx.contiguous(value[:, rows]) if name in timed else value
        for name, value in given.items()
    }


_HOOKS = {
    gated_delta_update: _hook(gated_delta_update, _replay_later),
    ssm_update: _hook(ssm_update, _walk),
}


_STEP = "_gated_delta_step_ops"
"""The function mlx-lm calls for each row; where it is called differently, rows are recomputed."""


def install_hooks(model: nn.Module) -> list[nn.Module]:
    """Hook the model's recurrences and convolutions for recording; returns the convolutions."""
    step = getattr(gated_delta, _STEP, None)
    if step is not None and not hasattr(step, "__wrapped__"):
        setattr(gated_delta, _STEP, _note_steps(step))
    convolutions: list[nn.Module] = []
    homes = set()
    for _, module in model.named_modules():
        homes.add(type(module).__module__)
        if type(module) is nn.Conv1d:
            install([Patch(module, _recording, is_reader=True)])
        if type(module) is RecordingConv1d:
            convolutions.append(module)
    for home in homes:
        names = vars(sys.modules[home])
        for original, hook in _HOOKS.items():
            if names.get(original.__name__) is original:
                names[original.__name__] = hook
    return convolutions


def has_known_recurrence(model: nn.Module, caches: Sequence[Any]) -> bool:
    """Return True if the recurrent layers of a model with these caches can be recomputed."""
    modules = [module for _, module in model.named_modules()]
    names = {name for module in modules for name in vars(sys.modules[type(module).__module__])}
    if names & {original.__name__ for original in _HOOKS}:
        return True
    # At most as many arrays as there are convolutions can be their windows.
    arrays = sum(len(cache.cache) for cache in caches if type(cache) is ArraysCache)
    return 0 < arrays <= sum(isinstance(module, nn.Conv1d) for module in modules)


class ReplayPlan:
    """How each array of a model's recurrent caches is restored after part of a pass."""

    def __init__(self, sources: list[list[int | None]], most_kept: int) -> None:
        """Set the attributes."""
        self.sources = sources
        """Per cache and array the id of its convolution, or None for a recurrence."""
        self.most_kept = most_kept
        """See `Recording`."""

    def rewind(self, caches: Sequence[Any], recording: Recording, keep: int) -> None:
        """Rewind the caches to the first `keep` rows of the pass; `keep` is at least 1.

        Raises:
            ValueError: the pass differs in structure from the one the plan was made from.
        """
        states = [cache for cache in caches if type(cache) is ArraysCache]
        for cache, sources in zip(states, self.sources, strict=True):
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
    """Return the plan that explains what a recorded pass over `rows` rows left in the caches."""
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
    return ReplayPlan(sources, recording.most_kept)


def size_pass(states: Sequence[int], plan: ReplayPlan | None, windows: int = 0) -> PassSize:
    """Estimate a pass's memory by the bytes of each recurrent layer's state."""
    if not any(states):
        return PassSize(windows=windows)
    if plan is None:
        held = _UNKNOWN_HELD * sum(states)
        return PassSize(sum(states), _UNKNOWN * max(states), 0, windows, held)
    # A kernel for all rows keeps its intermediate state in registers.
    alive = {0: 0, _ANY: _WALKED}.get(plan.most_kept, _STEPPED)
    return PassSize(sum(states), alive * max(states), plan.most_kept, windows)


def _source_of(
    array: Any, recording: Recording, convolutions: Sequence[nn.Module], rows: int
) -> int | None:
    """Return the convolution whose window this array is."""
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
