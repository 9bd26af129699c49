"""One sequence's part in a pass that has not been requested yet (`pass_ahead`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from protocol.messages import Tokens, VerificationOutcome, Verify
from services.batching.forward import Batcher, ForwardPass
from services.kernels.cuda.host_rows import ReadRows
from services.kv.state import SequenceState
from services.mlx.launching import launch


def next_plain(message: Verify, outcome: VerificationOutcome) -> Verify | None:
    """Return the expected next request: the bonus token alone, if it has been granted."""
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
    """One token of a pass over one token of each of several sequences."""

    by: ForwardPass
    row: int
    """Row of the pass."""
    state: SequenceState
    """A state of slots; it does not contain the token before the step is adopted."""
    read: Callable[[], list[int]]
    """Returns the tokens of the pass on the host."""
    logits: mx.array
    """[1, vocabulary], lazy"""

    @property
    def features(self) -> ReadRows | None:
        """[1, width] features of the model for this row."""
        joint = self.by.features
        return None if joint is None else joint[self.row : self.row + 1]

    def best(self) -> npt.NDArray[np.int32]:
        """Return [1], the argmax token after it (`ForwardPass.best`)."""
        return self.by.best(slice(self.row, self.row + 1))

    def take_up(self, chain: Tokens) -> mx.array | None:
        """Return the row's logits for this chain; see `PipelinedStep`."""
        if chain != [self.read()[self.row]]:
            return None
        self.state.append(1)
        return self.logits


class PipelinedStep:
    """A pass of one sequence, over one token that has not been requested yet.

    Args:
        batcher: builds the pass.
        state: of the sequence; it is unchanged until the pass is adopted.
        choice: [1] of `sampling.device.begin`, after the last token in the state; the pass is
            discarded if it is not a token.
    """

    def __init__(self, batcher: Batcher, state: SequenceState, choice: mx.array) -> None:
        self.by, self.row, self.best = ForwardPass(rows=1, sequences=1), 0, None
        self._state = state
        self._token = mx.maximum(choice, 0)
        # Before the pass is built, so that reading it does not wait for later work.
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
        """Return [1, vocabulary] logits if the pass is over this chain, and make it current."""
        token: Any = self._token.item()
        if chain != [token]:
            return None
        self._state.resume(self._suspended)
        return self.logits
