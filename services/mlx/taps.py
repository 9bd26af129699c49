"""Hidden states of some layers of an mlx-lm model, captured while the model runs.

The call of a tapped layer also keeps its result. It is not assumed that a layer returns the model's
whole state at that point: `prove` injects captured states into a run over other tokens, which must
then yield the first run's logits.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from protocol.errors import ModelError
from services.mlx.patches import Patch, install, remove
from services.mlx.selftest import TOLERANCES, measure_distance

Normalization = Literal["layer", "joint", "final", "none"]
"""As in `FeatureRequest.normalization`."""

Run = Callable[[mx.array], mx.array]
"""tokens[1, n] -> logits[1, n, vocabulary]"""


class TrialPasses(NamedTuple):
    """How the proof runs passes with a model that is one rank's part."""

    run: Run
    announce: Callable[[Sequence[int]], None] = lambda _: None
    """Announces to all others to `assist` with these layers."""


_FIRST, _SECOND = (1, 2, 3, 4, 5), (5, 3, 4, 1, 2)
_EPS = 1e-6


class _Tap:
    """The latest result of one layer, or the result it is to return instead of computing."""

    def __init__(self) -> None:
        self.caught: mx.array | None = None
        self.instead: mx.array | None = None


@functools.cache
def _add_tap(plain: type) -> type:
    """Derive the class whose calls go through the layer's tap."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        tap: _Tap = self.tap
        result = plain.__call__(self, *arguments, **named)
        if tap.instead is not None:
            # The layer still computes first: with ranks, all have to exchange the same arrays
            # in the same order.
            return mx.depends(tap.instead, result)
        tap.caught = result
        return result

    return type(f"Tapped{plain.__name__}", (plain,), {"__call__": call})


class Taps:
    """The taps of one model.

    Args:
        model: an mlx-lm model with its decoder in `model.model.layers`, or in the same place of
            its `language_model`.
        layers: indices of the layers to tap, from 0.
        trial: how passes are run, if not by calling the model.

    Raises:
        ModelError: there are no such layers, or their results are not the model's state.
    """

    def __init__(self, model: Any, layers: Sequence[int], trial: TrialPasses | None = None) -> None:
        self.layers = list(layers)
        inner = _inner(model)
        decoder: Any = getattr(inner, "layers", None)
        self._final_norm: Any = getattr(inner, "norm", None)
        if decoder is None:
            kind = getattr(model, "model_type", type(model).__name__)
            raise ModelError(f"models of type {kind!r} cannot be read: no model.layers in them")
        if not layers or min(layers) < 0 or max(layers) >= len(decoder):
            raise ModelError(
                f"the layers {self.layers} cannot be read: the target has layers "
                f"0 to {len(decoder) - 1}"
            )
        if len(set(layers)) < len(layers):
            raise ModelError(f"the layers {self.layers} cannot be read: one is named twice")
        tapped = [decoder[number] for number in layers]
        if None in tapped:
            raise ModelError(f"some of the layers {self.layers} are on other ranks")
        if any(hasattr(layer, "tap") for layer in tapped):
            raise ModelError(f"some of the layers {self.layers} are read already")
        self._taps = [_Tap() for _ in layers]
        self._patches = install(
            Patch(layer, _add_tap, {"tap": tap}, is_reader=True)
            for layer, tap in zip(tapped, self._taps, strict=True)
        )
        try:
            if trial is not None:
                trial.announce(layers)
            self.width = prove(trial.run if trial is not None else model, self._taps)
        except ModelError:
            self.remove()
            raise

    def remove(self) -> None:
        """Leave the layers as they were."""
        remove(self._patches)

    @contextlib.contextmanager
    def lift(self) -> Iterator[None]:
        """Remove the taps meanwhile."""
        remove(self._patches)
        try:
            yield
        finally:
            install(self._patches)

    def take(self) -> list[mx.array]:
        """Return per layer [rows, tokens, width] of the last run, and drop them.

        Raises:
            RuntimeError: the model has not run since the last call.
        """
        states = [tap.caught for tap in self._taps]
        for tap in self._taps:
            tap.caught = None
        caught = [state for state in states if state is not None]
        if len(caught) < len(states):
            raise RuntimeError("a tapped layer was not run")
        return caught

    def features(self, normalization: Normalization = "layer") -> mx.array:
        """Return `take`, concatenated and normalised as in `FeatureRequest.normalization`."""
        states = self.take()
        match normalization:
            case "layer":
                return join_states(states)
            case "final":
                states = [self._final_norm(state) for state in states]
        joint = mx.concatenate(states, axis=-1)
        return _normalise(joint) if normalization == "joint" else joint


def join_states(states: Sequence[mx.array]) -> mx.array:
    """Join states [..., width] of very different scales: [..., layers * width]."""
    return mx.concatenate([_normalise(state) for state in states], axis=-1)


def _normalise(state: mx.array) -> mx.array:
    normalised: mx.array = mx.fast.rms_norm(state, None, _EPS)
    return normalised


def is_tapped(model: Any) -> bool:
    """Return True if some layers of this model are tapped."""
    return any(hasattr(layer, "tap") for layer in getattr(_inner(model), "layers", ()))


def _inner(model: Any) -> Any:
    return getattr(getattr(model, "language_model", model), "model", None)


def prove(run: Run, taps: Sequence[_Tap]) -> int:
    """Prove the taps; return the width of all captured states together.

    It always runs one pass per tap and one more, since other ranks may take part.

    Raises:
        ModelError: a tapped layer's output is not the model's whole state.
    """
    expected = _run(run, _FIRST)
    states = [tap.caught for tap in taps]
    for tap in taps:
        tap.caught = None
    problems = []
    for number, (tap, state) in enumerate(zip(taps, states, strict=True)):
        whole = isinstance(state, mx.array) and state.ndim == 3
        tap.instead = state if whole else None
        try:
            logits = _run(run, _SECOND)
        finally:
            tap.instead = None
        distance = measure_distance(expected, logits)
        if not whole:
            problems.append(f"tap {number} of the target caught no [1, tokens, width] state")
        elif not distance <= TOLERANCES["tap"]:
            problems.append(
                f"what tap {number} of the target caught is not the model's whole state: with it, "
                f"the logits differ by {distance:.2g} of their size"
            )
    for tap in taps:
        tap.caught = None
    if problems:
        raise ModelError(problems[0])
    return sum(state.shape[-1] for state in states if state is not None)


def assist(model: Any, layers: Sequence[int], run: Run) -> None:
    """Take part in another rank's proof: the same passes, with the same states injected.

    In a pipeline, that rank has all these layers, and this one none.
    """
    decoder = _inner(model).layers
    if all(number < len(decoder) and decoder[number] is not None for number in layers):
        with contextlib.suppress(ModelError):  # the other rank gets the same error
            Taps(model, layers, TrialPasses(run)).remove()
        return
    for tokens in (_FIRST, *(_SECOND for _ in layers)):
        _run(run, tokens)


def _run(run: Run, tokens: Sequence[int]) -> mx.array:
    logits = run(mx.array([tokens]))
    mx.eval(logits)
    return logits
