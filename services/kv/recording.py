"""Inputs of recurrent layers in a pass, recorded so that the pass can be rewound.

One pass at a time is recorded: MLX has one thread per process. The caller that begins a pass says
whether to record it (`record_pass`), so that nothing is kept when it is not needed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass
class Recurrence:
    """One recurrence over the rows of a pass."""

    state: mx.array
    """State after the last row."""
    state_after: Callable[[int], mx.array]
    """Returns the state after the first n rows."""


@dataclass
class Recording:
    """Inputs of the layers of one sequence in one pass."""

    convolved: dict[int, mx.array] = field(default_factory=dict)
    """Convolution (its id) -> its input, [1, window + rows, channels]."""
    calls: list[Recurrence] = field(default_factory=list)
    keeps_steps: bool = False
    """Keep the states between rows where they are computed anyway."""
    most_kept: int = 0
    """Rows of the longest pass of this kind that holds the states between them."""

    def stop(self) -> None:
        """Stop recording."""
        if Tape.current is self:
            Tape.current = None

    def call_of(self, state: Any) -> Recurrence | None:
        """Return the recurrence that produced this state."""
        return next((call for call in self.calls if call.state is state), None)


class Tape:
    """The current recording of this process."""

    current: Recording | None = None
    steps: list[mx.array] | None = None
    """States after each row of the current recurrence, if it processes rows one by one."""


def record_pass(*, wanted: bool, keeps_steps: bool = False) -> Recording | None:
    """Return a recording of the next pass, or None; stop any other recording."""
    Tape.current = Recording(keeps_steps=keeps_steps) if wanted else None
    return Tape.current


def start_recording(*, keeps_steps: bool = False) -> Recording:
    """Record the next pass."""
    Tape.current = Recording(keeps_steps=keeps_steps)
    return Tape.current
