"""One sequence's part in a pass that was not asked for yet (`pass_ahead`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from protocol.messages import Tokens, VerificationOutcome, Verify
from services.batching.forward import Batcher, ForwardPass
from services.kv.state import SequenceState
from services.mlx.cuda.host_rows import ReadRows
from services.mlx.launching import launch


def next_plain(message: Verify, outcome: VerificationOutcome) -> Verify | None:
    """What the orchestrator would ask for next: the bonus token alone, if it has been granted."""
    if not outcome.goes_on:
        return None
    return replace(
        message,
        round=message.round + 1,
        position=message.position + outcome.accepted + 1,
        nodes=[outcome.bonus],
        parents=[],
        distributions=[],
        granted=message.granted - 1,
    )


@dataclass(frozen=True)
class SharedStep:
    """One token of a pass over one of each of several sequences."""

    by: ForwardPass
    row: int
    """Of the pass."""
    state: SequenceState
    """Of slots; it does not contain the token before the step is taken up."""
    read: Callable[[], list[int]]
    """The tokens of the pass, on the host."""
    logits: mx.array
    """[1, vocabulary], lazy"""

    @property
    def features(self) -> ReadRows | None:
        """[1, width] of what is read of the model there."""
        joint = self.by.features
        return None if joint is None else joint[self.row : self.row + 1]

    def best(self) -> npt.NDArray[np.int32]:
        """[1] the likeliest token after it (`ForwardPass.best`)."""
        return self.by.best(slice(self.row, self.row + 1))

    def take_up(self, chain: Tokens) -> mx.array | None:
        """See `PipelinedStep`."""
        if chain != [self.read()[self.row]]:
            return None
        self.state.append(1)
        return self.logits


class PipelinedStep:
    """A pass of one sequence, over one token that was not asked for yet.

    Args:
        batcher: builds the pass.
        state: of the sequence; it stays what it was until the pass is taken up.
        choice: [1] of `sampling.device.begin`, after the last token in the state; the pass is
            discarded if it is not a token.
    """

    def __init__(self, batcher: Batcher, state: SequenceState, choice: mx.array) -> None:
        self.by, self.row, self.best = ForwardPass(rows=1, sequences=1), 0, None
        self._state = state
        self._token = mx.maximum(choice, 0)
        # Before the pass is built, so that reading it waits for nothing behind it.
        launch(choice, self._token)
        length = state.length
        state.append(1)
        try:
            self.logits, self.features = batcher.begin_alone(self._token, state)
        except BaseException:
            state.commit(length)
            raise
        self._suspended = state.suspend()
        launch(self.logits)

    def take_up(self, chain: Tokens) -> mx.array | None:
        """[1, vocabulary] logits of this chain, whose pass is then in work; None if not run."""
        token: Any = self._token.item()
        if chain != [token]:
            return None
        self._state.resume(self._suspended)
        return self.logits
