"""Inputs of recurrent layers in a pass, recorded so that the pass can be gone back into.

One pass at a time is recorded: MLX has one thread in a process. Whoever begins a pass says
whether it is to be recorded (`record_pass`), so that nothing is kept of one that needs none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass
class Recurrence:
    """One recurrence over the rows of a pass."""

    state: mx.array
    """After the last row."""
    state_after: Callable[[int], mx.array]
    """After the first rows."""


@dataclass
class Recording:
    """Inputs of the layers of one sequence in one pass."""

    convolved: dict[int, mx.array] = field(default_factory=dict)
    """By convolution (its id): its input, [1, window + rows, channels]."""
    calls: list[Recurrence] = field(default_factory=list)
    keeps_steps: bool = False
    """Whether states between rows are kept where they are computed anyway."""
    most_kept: int = 0
    """Rows of the longest pass like this one that holds the states between them."""

    def stop(self) -> None:
        """Record no more."""
        if Tape.current is self:
            Tape.current = None

    def call_of(self, state: Any) -> Recurrence | None:
        """The recurrence that left this state."""
        return next((call for call in self.calls if call.state is state), None)


class Tape:
    """Where recurrences of this process are recorded now."""

    current: Recording | None = None
    steps: list[mx.array] | None = None
    """States after each row of the recurrence in work, if it walks its rows one by one."""


def record_pass(*, wanted: bool, keeps_steps: bool = False) -> Recording | None:
    """The recording of the pass that comes now, if it is wanted; no other one goes on."""
    Tape.current = Recording(keeps_steps=keeps_steps) if wanted else None
    return Tape.current


def start_recording(*, keeps_steps: bool = False) -> Recording:
    """Record the pass that comes now."""
    Tape.current = Recording(keeps_steps=keeps_steps)
    return Tape.current
