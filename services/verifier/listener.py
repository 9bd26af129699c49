"""Hears of prepared rounds, and does so while the device computes where that can be.

What is read before a pass is over need not be read when it is, while the device idles.
"""

import time
from collections.abc import Callable, Iterable, Mapping

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.messages import VerifyAhead
from services.batching.forward import ForwardPass
from services.mlx.launching import launch
from services.verifier.sequence import TargetSequence

_SURE = 0.8
"""Share of the shortest time of a pass for which the device is certainly at work."""
_FORGIVING = 1.02
"""Passes get longer with their sequences."""


class Listener:
    """Tells sequences what may follow the rounds in work."""

    def __init__(self, sequences: Mapping[int, TargetSequence]) -> None:
        self._sequences = sequences
        self.take: Callable[[], Iterable[VerifyAhead]] = tuple
        """Those that have just come."""
        self.wait: Callable[[float], bool] = lambda _: False
        """Whether anything comes within so many seconds."""
        self._shortest_s: dict[int, float] = {}
        """Of passes, by their rows."""

    def on_message(self, message: VerifyAhead) -> None:
        """Rounds that may follow the one in work."""
        if (about := self._sequences.get(message.sequence)) is not None:
            about.prepared.add(message)

    def listen(self) -> None:
        """Read what has come."""
        for message in self.take():
            self.on_message(message)

    def listen_beside(self, by: ForwardPass, result: mx.array | npt.NDArray[np.int32]) -> None:
        """Have the device compute this result of a pass, and listen until that is nearly done."""
        if not isinstance(result, mx.array):
            return  # it is here
        launch(result)
        until = by.started + _SURE * self._shortest_s.get(by.rows, 0.0)
        self.listen()
        while self.wait(until - time.perf_counter()):
            self.listen()

    def on_pass(self, by: ForwardPass) -> None:
        """It is over."""
        took_s = by.ended - by.started
        known_s = self._shortest_s.get(by.rows, took_s)
        self._shortest_s[by.rows] = min(took_s, _FORGIVING * known_s)
