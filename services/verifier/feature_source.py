"""Features that the verifier reads from the target for a drafter, and the messages with them."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import numpy as np

from protocol.decoding.tokens import common_prefix_length
from protocol.errors import ModelError
from protocol.messages import FeatureRequest, Features, Tokens
from services.kernels.cuda.host_rows import HostRows, ReadRows, open_host_rows
from services.runtime.preparation import Steps

if TYPE_CHECKING:
    from services.mlx.taps import Taps, TrialPasses
    from services.verifier.feature_log import FeatureLog, Rows
    from services.verifier.sequence import TargetSequence

T = TypeVar("T")

_BYTES = 1 << 20
"""Size of a message, unless a single position is larger."""
_LARGEST_HALF = 65504.0
"""Normalised states fit into half precision; others may be larger."""
_KEPT = 4
"""Finished sequences whose states are kept."""


class FeatureSource:
    """The taps of the target and the projection that a drafter requested; initially none.

    Args:
        model: the target, or this rank's part.
        trial: as for `Taps`.
    """

    def __init__(self, model: Any, trial: "TrialPasses | None" = None) -> None:
        self._model = model
        self._trial = trial
        self.request: FeatureRequest | None = None
        self._number = 0
        self._taps: Taps | None = None
        self._projection: mx.array | None = None
        self._replayed: mx.array | None = None
        self._host: HostRows | None = None
        self._kept: list[tuple[Tokens, FeatureLog]] = []
        """Logs of the last few finished sequences."""

    def configure(self, request: FeatureRequest | None, number: int = 0) -> None:
        """Read these features from now on, and tag messages with this number.

        Raises:
            ModelError: they cannot be read; then nothing is.
        """
        self._number = number
        if request == self.request:
            return
        if self._taps is not None:
            self._taps.remove()
        self.request = self._taps = self._projection = self._replayed = self._host = None
        self._kept = []
        if request is None:
            return
        from services.mlx.taps import Taps  # noqa: PLC0415

        taps = Taps(self._model, request.layers, self._trial)
        try:
            self._projection = _read_projection(request, taps.width)
        except ModelError:
            taps.remove()
            raise
        self.request, self._taps = request, taps
        width = taps.width if self._projection is None else self._projection.shape[0]
        self._host = open_host_rows(width, getattr(mx, request.dtype))

    def leave_out(self, steps: Steps[T]) -> Steps[T]:
        """Run steps that are about the model as it is when nothing is read."""
        while True:
            with self._taps.lift() if self._taps is not None else contextlib.nullcontext():
                try:
                    next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
            yield

    def take(self) -> ReadRows | None:
        """Return lazy [tokens, width] of the last pass with padding; None if nothing is read."""
        replayed, self._replayed = self._replayed, None
        rows = self.compute() if replayed is None else replayed
        return None if rows is None else self.send(rows)

    def send(self, rows: mx.array) -> ReadRows:
        """Send the rows of a pass to the host, if that is part of the pass."""
        return rows if self._host is None else self._host.send(rows)

    def put(self, features: mx.array) -> None:
        """Set the features of the last pass: the replay of a trace, which bypasses the taps."""
        self._replayed = features

    def compute(self) -> mx.array | None:
        """Return [tokens, width] of the states captured last, lazy; None if nothing is read."""
        if self._taps is None or self.request is None:
            return None
        features = self._taps.features(self.request.normalization)[0]
        if self._projection is not None:
            features = features @ self._projection.T.astype(features.dtype)
        if self.request.dtype == "float16":
            features = mx.clip(features, -_LARGEST_HALF, _LARGEST_HALF)
        return features.astype(getattr(mx, self.request.dtype))

    def begin(self, tokens: Tokens, running: Iterable["TargetSequence"]) -> "FeatureLog | None":
        """Start a log with the features of these tokens in other sequences, if any."""
        if self.request is None:
            return None
        best = self._new_log(self.request)
        others = [(one.tokens, one.features) for one in running if one.features is not None]
        for known, log in [*self._kept, *others]:
            length = common_prefix_length(known, tokens)
            if log.request == self.request and min(length, log.end) > best.end:
                best = log.fork(length)
        return best

    @staticmethod
    def _new_log(request: FeatureRequest) -> "FeatureLog":
        from services.verifier.feature_log import FeatureLog  # noqa: PLC0415

        return FeatureLog(request)

    def keep(self, sequence: "TargetSequence") -> None:
        """Keep a finished sequence's log for others with the same prefix."""
        if sequence.features is not None and sequence.features.request == self.request:
            self._kept = [*self._kept[1 - _KEPT :], (sequence.tokens, sequence.features)]

    def log(
        self, sequence: "TargetSequence", position: int, rows: "ReadRows | Rows | None"
    ) -> "Rows | None":
        """Keep the rows of its tokens from `position` on; return them in the form they are sent."""
        if rows is None or self.request is None:
            return None
        if sequence.features is None or sequence.features.request != self.request:
            sequence.features = self._new_log(self.request)
        on_host = rows if isinstance(rows, np.ndarray) else np.array(rows)
        sequence.features.append(position, on_host)
        return on_host

    def messages(self, number: int, sequence: "TargetSequence") -> Iterator[Features]:
        """Return messages with all rows kept of a sequence."""
        log = sequence.features
        if log is None or log.request != self.request:
            return
        for first, rows in log.blocks(_BYTES):
            yield self.message(number, first, rows)

    def message(self, sequence: int, first: int, rows: "Rows") -> Features:
        """Return the message for these rows."""
        data = np.ascontiguousarray(rows).tobytes()
        return Features(
            sequence=sequence, first=first, count=len(rows), data=data, request=self._number
        )


def _read_projection(request: FeatureRequest, width: int) -> mx.array | None:
    """Return the requested projection, with the weights of its norms folded in."""
    if not request.projection:
        return None
    path = Path(request.projection)
    if path.suffix != ".safetensors":
        raise ModelError(f"the projection {str(path)!r} is not a safetensors file")
    try:
        loaded: Any = mx.load(str(path))
        projection = _fold_norms(loaded, request)
    except (OSError, RuntimeError, KeyError) as error:
        raise ModelError(f"the projection {str(path)!r} cannot be read: {error}") from error
    if projection.ndim != 2 or projection.shape[1] != width:
        raise ModelError(
            f"the projection {str(path)!r} takes {projection.shape[-1]} numbers, and the target's "
            f"layers {request.layers} have {width}"
        )
    mx.eval(projection)
    return projection


def _fold_norms(tensors: dict[str, mx.array], request: FeatureRequest) -> mx.array:
    """Return `fc.weight` [rows, columns] times the weights of the norm before it, if any."""
    projection = tensors["fc.weight"]
    if request.normalization == "joint" and "input_norm.weight" in tensors:
        return projection * tensors["input_norm.weight"].astype(projection.dtype)
    names = [f"fc_norm.{index}.weight" for index in range(len(request.layers))]
    if request.normalization == "layer" and all(name in tensors for name in names):
        weights = mx.concatenate([tensors[name] for name in names])
        return projection * weights.astype(projection.dtype)
    return projection
